// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/bench/peers"
)

// TestFileMovesBothKindsOfPieces: blocks past the page cache, and what is no block through it.
func TestFileMovesBothKindsOfPieces(t *testing.T) {
	const whole = 1 << 20
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, make([]byte, whole), 0o600))
	e := &fileEnd{}
	defer e.close()
	if _, err := e.Open(&peers.Request{Lane: "file", Bytes: whole}); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, e.Connect(base64.StdEncoding.EncodeToString(fmt.Appendf(nil, `{"path": %q}`,
		path))))
	for i := range e.memory {
		e.memory[i] = byte(i * 7)
	}
	want := bytes.Clone(e.memory)
	for _, size := range []uint64{4096, 656} {
		local, remote := []int32{3, 0, 7}, []int32{5, 9, 2}
		move(t, e, "write", size, local, remote)
		got, err := os.ReadFile(path)
		require.NoError(t, err)
		for i := range local {
			if !bytes.Equal(got[uint64(remote[i])*size:][:size],
				want[uint64(local[i])*size:][:size]) {
				t.Errorf("piece %d of %d bytes is not in the file", i, size)
			}
		}
		clear(e.memory)
		move(t, e, "read", size, local, remote)
		for i := range local {
			if at := uint64(local[i]) * size; !bytes.Equal(e.memory[at:][:size], want[at:][:size]) {
				t.Errorf("piece %d of %d bytes did not come back", i, size)
			}
		}
		copy(e.memory, want)
	}
}

func move(t *testing.T, e *fileEnd, op string, size uint64, local, remote []int32) {
	t.Helper()
	p, err := e.Prepare(op, size, local, remote)
	require.NoError(t, err)
	require.NoError(t, errors.Join(p.Post(context.Background()), p.Close()))
}

func TestFileIsForItsLaneAlone(t *testing.T) {
	e := &fileEnd{}
	defer e.close()
	if _, err := e.Open(&peers.Request{Lane: "host", Bytes: 4096}); !errors.Is(err,
		peers.ErrUnsupported) {
		t.Errorf("another lane: %v", err)
	}
	if err := e.Connect("no card"); err == nil {
		t.Error("it read what is no card")
	}
	if err := e.Notify(nil); !errors.Is(err, peers.ErrUnsupported) {
		t.Errorf("a message to a file: %v", err)
	}
}
