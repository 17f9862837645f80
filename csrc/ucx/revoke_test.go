// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import (
	"bytes"
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestRevokesOfSeveralAtOnce(t *testing.T) {
	l := openLane(t, overTCP)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 30 {
				if err := l.far.Revoke(testKey, testLimit); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(t, l.far.Revoke(KeysMax, testLimit), "no memory")
}

func TestManyMemories(t *testing.T) {
	l := openLane(t, overTCP)
	const n = 10000
	for key := uint32(100); key < 100+n; key++ {
		require.NoError(t, l.far.Map(key, Memory{Mem: l.remote[key*8:][:8],
			Ticket: uint64(key)}))
	}
	if err := l.far.Map(100, Memory{Mem: l.remote[:8], Ticket: 1}); err == nil {
		t.Error("a key twice")
	}
	if err := l.far.Map(KeysMax, Memory{Mem: l.remote[:8], Ticket: 1}); err == nil {
		t.Error("a key beyond the table")
	}
	var d []driver.Desc
	for key := uint32(100); key < 100+n; key += 997 {
		slot, err := l.conn.Import(Import{Key: key, Size: 8, Ticket: uint64(key)})
		require.NoError(t, err)
		d = append(d, driver.Desc{Local: uint64(key), Len: 8, LocalKey: testKey,
			RemoteKey: slot})
	}
	fill(l.local[:n+200], 3)
	require.NoError(t, errors.Join(submit(l.conn, driver.Write, 1, d, nil),
		l.outcome(t, 1)))
	for _, d := range d {
		if !bytes.Equal(l.local[d.Local:d.Local+8], l.remote[d.Local*8:d.Local*8+8]) {
			t.Fatalf("key %d: other bytes", d.Local)
		}
	}
	for key := uint32(100); key < 100+n; key++ {
		_ = l.far.Revoke(key, testLimit)
	}
	if err := errors.Join(submit(l.conn, driver.Write, 2, d, nil),
		l.outcome(t, 2)); !errors.Is(err, driver.ErrRevoked) {
		t.Fatalf("write to what is not there any more: %v", err)
	}
}
