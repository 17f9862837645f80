// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package verbs

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

// TestListThatChanges reads by a list that changes while it is submitted, into a part of what
// the NIC knows: nothing beside that part changes.
func TestListThatChanges(t *testing.T) {
	l := openLink(t, fakeDevices(t, 1), testShape{spin: true})
	const n, run = 1024, 64
	part := l.local[:n*run]
	const key = testKey + 1
	p := pin(t, l.near, 0, l.local, 0)
	require.NoError(t, l.near.Map(key, part, []*Pin{p}, 1))
	fill(l.remote, 1)
	beside := bytes.Clone(l.local[len(part):])
	pattern := l.pattern(n, run, run, run)
	pattern.LocalKey = key
	pattern.Local.List = make([]uint32, n)
	for i := range pattern.Local.List {
		pattern.Local.List[i] = uint32(i)
	}
	var over atomic.Bool
	var changing sync.WaitGroup
	changing.Go(func() {
		last := &pattern.Local.List[n-1]
		for !over.Load() {
			atomic.StoreUint32(last, n+5)
			atomic.StoreUint32(last, n-1)
		}
	})
	for range 3000 {
		l.tag++
		if l.conn.Submit(l.tag, &driver.Batch{Op: driver.Read, Pattern: pattern}) == nil {
			require.NoError(t, l.outcome(t, l.tag))
		}
	}
	over.Store(true)
	changing.Wait()
	same := bytes.Equal(beside, l.local[len(part):])
	require.True(t, same, "memory beside what was registered has changed")
	require.NoError(t, l.near.Unmap(key))
}
