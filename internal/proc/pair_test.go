// SPDX-License-Identifier: Apache-2.0

package proc

import (
	"errors"
	"io"
	"net"
	"testing"

	"github.com/stretchr/testify/require"
)

func connections(t *testing.T) (a, b net.Conn) {
	t.Helper()
	fa, fb, err := Pair()
	require.NoError(t, err)
	a, errA := Conn(fa)
	b, errB := Conn(fb)
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestPairIsConnected(t *testing.T) {
	a, b := connections(t)
	if _, err := a.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	a.Close()
	got, err := io.ReadAll(b)
	if err != nil || string(got) != "hello" {
		t.Errorf("read %q, %v", got, err)
	}
}

func TestSingleAcceptsOnce(t *testing.T) {
	a, _ := connections(t)
	l := NewSingle(a)
	c, err := l.Accept()
	if err != nil || c != a || l.Addr() == nil {
		t.Fatalf("accepted %v, %v", c, err)
	}
	done := make(chan error)
	go func() { _, err := l.Accept(); done <- err }()
	l.Close()
	l.Close()
	if err := <-done; !errors.Is(err, net.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestSingleClosesWhatNobodyAccepts(t *testing.T) {
	a, b := connections(t)
	NewSingle(a).Close()
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the other end reads %v, want the end", err)
	}
}
