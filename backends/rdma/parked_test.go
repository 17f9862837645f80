// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// parkAt has the first batch that comes to the one spot that there is call f there.
func parkAt(_ string, f func()) { parked.First(spotSubmit, f) }

// checkFenceParked has a batch stand between its check and its post while the owner revokes, gives
// the memory another use, and another goroutine imports it anew and writes.
func checkFenceParked(t *testing.T, p *pair) {
	l, r := register(t, p.near, 4096), register(t, p.far, 4096)
	old := p.imports(t, r)
	for i := range l.bytes {
		l.bytes[i] = 0xee
	}
	batch := parked.Stand(t, spotSubmit)[0]
	p.tag += 2
	stale, tag := p.tag-1, p.tag
	submitted := make(chan error, 1)
	go func() {
		submitted <- p.peer.Submit(stale,
			writeOf(driver.Desc{Len: 4096, LocalKey: l.key, RemoteKey: old}))
	}()
	<-batch.Came
	require.NoError(t, r.Revoke(t.Context()))
	clear(r.bytes)
	again, err := p.far.Register(driver.Segment{Kind: driver.DRAM, Mem: r.bytes, Len: 4096})
	require.NoError(t, err)
	next := again.(*memory)
	fresh := p.imports(t, next)
	d := driver.Desc{Len: 64, LocalKey: l.key, RemoteKey: fresh}
	require.NoError(t, p.peer.Submit(tag, writeOf(d)))
	require.NoError(t, p.await(t, tag))
	batch.GoOn()
	err = <-submitted
	if err == nil {
		err = p.await(t, stale)
	}
	require.ErrorIs(t, err, driver.ErrRevoked)
	require.NoError(t, next.Revoke(t.Context()))
	require.Equal(t, bytes.Repeat([]byte{0xee}, 64), r.bytes[:64])
	require.Equal(t, make([]byte, 4096-64), r.bytes[64:])
}

func TestFenceParked(t *testing.T) { checkFenceParked(t, openPair(t, Config{})) }
