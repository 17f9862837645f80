// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/engine"
)

const (
	revokeTries  = 3
	revokeAtOnce = 8  // a frozen peer costs the backend's grace for each lease
	revokeInLine = 32 // leases that are revoked without further goroutines
)

// errStuck is what the holder of a request learns whose blocks are retired.
var errStuck = fmt.Errorf("a lease could not be revoked: its block is lost to the pool until "+
	"there is a proof: %w", engine.ErrUnproven)

// revoke ends all leases, and reports whether it is proven that nothing lands
// through any of them. Where it is not, the block is not used before the engine has found the proof
// after all: better a smaller pool than a wrong byte.
func (q *Request) revoke() bool {
	first, cancel := context.WithTimeout(context.Background(), q.r.cfg.RevokeTimeout)
	defer cancel()
	var stuck atomic.Int64
	if isClosed(q.complete) && len(q.leases) <= revokeInLine {
		for i := range q.leases { // quiet: no goroutine is worth its price
			q.revokeOne(first, i, &stuck)
		}
	} else {
		q.revokeTogether(first, &stuck)
	}
	q.r.count.quarantined.Add(uint64(stuck.Load()))
	return stuck.Load() == 0
}

func (q *Request) revokeTogether(first context.Context, stuck *atomic.Int64) {
	var all sync.WaitGroup
	var next atomic.Int64
	for range min(revokeAtOnce, len(q.leases)) {
		all.Go(func() {
			for i := next.Add(1) - 1; int(i) < len(q.leases); i = next.Add(1) - 1 {
				q.revokeOne(first, int(i), stuck)
			}
		})
	}
	all.Wait()
}

// revokeOne ends the lease on the missing block i. The first try shares its time
// with those of the other blocks, the further ones have their own.
func (q *Request) revokeOne(first context.Context, i int, stuck *atomic.Int64) {
	if q.leases[i].Revoke(first) == nil {
		return
	}
	for range revokeTries - 1 {
		ctx, cancel := context.WithTimeout(context.Background(), q.r.cfg.RevokeTimeout)
		err := q.leases[i].Revoke(ctx)
		cancel()
		if err == nil {
			return
		}
	}
	restore := q.grant.Retire(q.Missing[i])
	stuck.Add(1)
	q.r.running.Go(func() {
		select {
		case <-q.leases[i].Revoked():
			restore()
		case <-q.r.closing:
		}
	})
}
