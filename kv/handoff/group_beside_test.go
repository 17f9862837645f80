// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// TestGroupLeasesTheBlocksAlone: what a rank is granted for one request opens none of the blocks of
// others to it, whatever its program does: it may neither write there, nor read.
func TestGroupLeasesTheBlocksAlone(t *testing.T) {
	pushAndPull(t, func(t *testing.T, s crowdSetup) {
		c := newCrowd(t, s)
		j := c.newJob(t, layout.Span{To: 40})
		j.begin(t)
		for _, op := range []engine.Op{engine.Write, engine.Read} {
			for _, h := range j.granted(t) {
				besides(t, h, op)
			}
		}
		j.end(t, 0)
		j.awaitEnd(t)
	})
}

// holding is a lease that one rank has of another's region.
type holding struct {
	by     *member
	peer   *engine.Peer
	remote *engine.Remote
	ranges []layout.Range // that it is for
	size   uint64
}

// granted lists what the ranks have been granted.
func (j *job) granted(t *testing.T) (list []holding) {
	add := func(by, of *member, peer int, remotes []*engine.Remote, tables layout.Tables) {
		for i, r := range remotes {
			if r != nil {
				ranges, err := of.side.Ranges(i, tables, j.span)
				require.NoError(t, err)
				list = append(list, holding{by, by.peers[peer], r, ranges, of.regions[i].Size()})
			}
		}
	}
	for i, p := range j.pushes {
		for _, l := range p.links {
			add(j.c.from[i], j.c.to[l.to], l.to, l.remotes, j.to[l.to])
		}
	}
	for i, q := range j.requests {
		q.r.mu.Lock()
		for _, l := range q.links {
			add(j.c.to[i], j.c.from[l.from], l.from, l.remotes, j.from[l.from])
		}
		q.r.mu.Unlock()
	}
	require.NotEmpty(t, list)
	return list
}

// besides has a rank reach for the first byte that is beside the ranges of a lease.
func besides(t *testing.T, h holding, op engine.Op) {
	t.Helper()
	var at uint64
	for _, r := range h.ranges {
		if at < r.Off {
			break
		}
		at = r.Off + r.Len
	}
	require.Less(t, at, h.size, "the test needs a block of another request")
	var local *engine.Region
	for _, r := range h.by.regions {
		if r != nil {
			local = r
		}
	}
	tr, err := h.by.eng.NewTransfer(h.peer, op, engine.Route{})
	require.NoError(t, err)
	defer func() { require.NoError(t, tr.Close()) }()
	if err = tr.Add(local, 0, h.remote, at, 1); err == nil {
		require.NoError(t, tr.Post())
		err = tr.Wait(within(t))
	}
	if !errors.Is(err, driver.ErrReadOnly) {
		require.ErrorIs(t, err, driver.ErrBounds, "%v of byte %d, of another request", op, at)
	}
}
