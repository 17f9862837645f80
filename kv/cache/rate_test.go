// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/engine"
)

// TestClasses: the engine knows loads as swap-ins, and stores and writes to disks as swap-outs.
func TestClasses(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, withDisk(filepath.Join(t.TempDir(), "disk"), 32))
	keys := ids(0, 4)
	require.Equal(t, all(Done, 4), n.put(t, keys))
	require.NoError(t, n.Drain(t.Context()))
	posts := func(c engine.Class) uint64 { return n.engine.Stats().Classes[c].Posts }
	out := posts(engine.SwapOut)
	require.GreaterOrEqual(t, out, uint64(2), "to memory, and to the disk")
	require.Zero(t, posts(engine.SwapIn))
	require.Equal(t, all(Done, 4), n.get(t, keys))
	require.Positive(t, posts(engine.SwapIn))
	require.Equal(t, out, posts(engine.SwapOut))
}

// TestBytesASecond has a namespace that has copied what it may: what would have to wait for longer
// than its ctx is Late at once, and the rest until ctx ends.
func TestBytesASecond(t *testing.T) {
	n := openNode(t, memoryFile(t), 16, nil)
	keys := ids(0, 4)
	require.Equal(t, all(Done, 4), n.put(t, keys))
	_, err := n.Namespace("model", NamespaceOptions{BytesASecond: 1})
	require.NoError(t, err)
	load := func(ctx context.Context) *Op {
		op := n.ns.Load(ctx, keys, n.at(0, 4))
		_ = op.Wait(t.Context())
		return op
	}
	require.Equal(t, all(Done, 4), load(t.Context()).Outcomes(), "what may come at once")
	require.True(t, n.spaces.rates[n.ns.id].Load().AllowN(time.Now(), batchBytes-4*blockBytes))

	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	op := load(ctx)
	require.Equal(t, all(Late, 4), op.Outcomes())
	require.ErrorIs(t, op.Err(), engine.ErrExpired)
	op = n.ns.Store(ctx, ids(4, 4), n.at(0, 4))
	require.ErrorIs(t, op.Wait(t.Context()), engine.ErrExpired)
	require.Equal(t, all(Late, 4), op.Outcomes())

	ctx, stop := context.WithCancel(t.Context())
	waits := n.ns.Load(ctx, keys, n.at(0, 4))
	stop()
	<-waits.Done()
	require.Equal(t, all(Late, 4), waits.Outcomes())

	_, err = n.Namespace("model", NamespaceOptions{})
	require.NoError(t, err)
	require.Equal(t, all(Done, 4), load(t.Context()).Outcomes())
}

// TestADiskIsNotBlamedForItsTurn: what had no turn by its class is no error of a disk.
func TestADiskIsNotBlamedForItsTurn(t *testing.T) {
	d := &disk{}
	for range 2 * failuresMax {
		d.failed(engine.ErrExpired)
		d.failed(engine.ErrBusy)
	}
	require.True(t, d.usable())
	for range failuresMax {
		d.failed(engine.ErrTimeout)
	}
	require.False(t, d.usable())
}
