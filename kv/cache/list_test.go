// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// TestBlocksPages: a list that is asked for in small pages has each block once.
func TestBlocksPages(t *testing.T) {
	n := openNode(t, memoryFile(t), 64, nil)
	var ids []uint64
	for id := range uint64(40) {
		ids = append(ids, id+1)
	}
	keys := keysOf(ids...)
	require.Equal(t, all(Done, 40), n.put(t, keys))
	other, err := n.Namespace("other", NamespaceOptions{})
	require.NoError(t, err)
	_, err = n.Namespace("\xff", NamespaceOptions{}) // for programs that print it
	require.ErrorIs(t, err, engine.ErrBounds)
	n.spaces.write(9, "\xff", [16]byte{9}) // as a version before may have
	again := openSpaces(n.memory)
	require.True(t, again.valid(other.id))
	require.False(t, again.valid(9))
	var listed []Key
	page := make([]BlockInfo, 7)
	for from := uint32(0); ; {
		count, next := n.ns.Blocks(from, page)
		for _, b := range page[:count] {
			listed = append(listed, b.Key)
		}
		if from = next; next == 0 {
			break
		}
	}
	require.ElementsMatch(t, keys, listed)
	count, next := other.Blocks(0, page)
	require.Zero(t, count)
	require.Zero(t, next)
	count, _ = n.ns.Blocks(1<<31, page) // a place that is none
	require.Zero(t, count)
}
