// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/driver/drivertest"
	"github.com/sluicehq/sluice/internal/testpoint"
)

// TestHelpStopsAfterAPiece has the only worker held up in another batch, so that
// what is copied is copied by Help alone.
func TestHelpStopsAfterAPiece(t *testing.T) {
	const piece, size = 4096, 1 << 20
	b := open(t, Config{Workers: 1, InlineMax: -1, PieceMax: piece})
	held, _ := share(t, b, drivertest.HostMemory, size)
	from, src := share(t, b, drivertest.HostMemory, size)
	to, dst := share(t, b, drivertest.HostMemory, size)
	p := dial(t, b, b.Addr())
	key := func(m *memory) uint32 {
		token, err := m.AppendToken(nil)
		require.NoError(t, err)
		key, _, err := p.Import(token)
		require.NoError(t, err)
		return key
	}
	fill(src, 0x5A)

	worker := testpoint.Stand(t, "shm: announced")[0] // the only one
	first := []driver.Desc{{Len: piece, LocalKey: held.Key(), RemoteKey: key(from)}}
	require.NoError(t, p.Submit(1, &driver.Batch{Op: driver.Read, Descs: first}))
	<-worker.Came
	second := []driver.Desc{{Len: size, LocalKey: from.Key(), RemoteKey: key(to)}}
	require.NoError(t, p.Submit(2, &driver.Batch{Op: driver.Write, Descs: second}))
	stop := make(chan struct{})
	close(stop)
	if !p.Help(2, stop) {
		t.Fatal("Help did nothing for a batch that waits")
	}
	const places = 2 // the one that was given back, and one for the worker to join in
	if dst[0] != 0x5A || dst[piece] != 0 || b.queue.len() != places {
		t.Errorf("after one piece: bytes %#x and %#x, %d in the queue; want %#x, 0 and %d", dst[0],
			dst[piece], b.queue.len(), 0x5A, places)
	}
	worker.GoOn()
	for tag := uint64(1); tag <= 2; tag++ {
		if err := await(t, b, tag); err != nil {
			t.Errorf("batch %d: %v", tag, err)
		}
	}
	if dst[size-1] != 0x5A {
		t.Error("the rest of the batch is missing")
	}
}
