// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"testing"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func alloc(t testing.TB, e *Engine, n uint64, o AllocOptions) *Memory {
	t.Helper()
	m, err := e.Alloc(n, o)
	check(t, err)
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("close memory: %v", err)
		}
	})
	return m
}

func TestMemoryOutlivesTheEngine(t *testing.T) {
	testkit.CheckLeaks(t)
	e := open(t, "tenant")
	m := alloc(t, e, 4096, AllocOptions{})
	_, err := e.Register("r", m.Segment())
	check(t, err)
	fill(m.Bytes(), 9)
	check(t, e.Close())
	want := make([]byte, 4096)
	fill(want, 9)
	if !bytes.Equal(m.Bytes(), want) {
		t.Error("the bytes changed with the end of the engine")
	}
	if _, err := e.Alloc(1, AllocOptions{}); !errors.Is(err, ErrClosed) {
		t.Errorf("Alloc of a closed engine: %v", err)
	}
	check(t, m.Close())
	seg := m.Segment()
	if m.Bytes() != nil || seg.Check() == nil {
		t.Error("closed memory still shows bytes")
	}
}
