// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/internal/testing/testkit"
)

func TestMemoryOutlivesTheEngine(t *testing.T) {
	testkit.CheckLeaks(t)
	e := open(t, "tenant")
	m, err := e.Alloc(4096, AllocOptions{})
	check(t, err)
	_, err = e.Register("r", m.Segment())
	check(t, err)
	fill(m.Bytes(), 9)
	check(t, e.Close())
	want := make([]byte, 4096)
	fill(want, 9)
	require.True(t, bytes.Equal(m.Bytes(), want), "the bytes changed with the end of the engine")
	require.ErrorIs(t, second(e.Alloc(1, AllocOptions{})), ErrClosed, "Alloc of a closed engine")
	check(t, m.Close())
	seg := m.Segment()
	if m.Bytes() != nil || seg.Check() == nil {
		t.Error("closed memory still shows bytes")
	}
}
