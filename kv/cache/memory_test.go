// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNewMemoryFile: one without room is refused, and leaves no bytes; one whose ctx has ended has
// all of its pages, and says that they are no huge ones.
func TestNewMemoryFile(t *testing.T) {
	path := memoryFile(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	s := shape{entries: 1 << 10, extent: 2 << 20, bytes: 8 << 40}
	_, err := openMemory(ctx, path, s)
	require.ErrorContains(t, err, "free; make the tier smaller")
	info, err := os.Stat(path)
	if err == nil {
		require.Zero(t, info.Size())
	}
	s.bytes = 4 << 20
	m, err := openMemory(ctx, path, s)
	require.NoError(t, err)
	require.True(t, m.basePages)
	clear(m.data)
	require.NoError(t, m.close(false))
}
