// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// groupLine keeps what one request to a peer leaves for the next: idle transfers, and the last
// imports of each region (see Push.moor).
type groupLine struct {
	eng   *engine.Engine
	peer  *engine.Peer
	op    engine.Op
	route engine.Route

	mu      sync.Mutex
	idle    []*layerTransfer
	anchors []*engine.Remote // by region of the peer
	closed  bool
}

// layerTransfer is one layer on its way along one edge, with what the transfer refers to until
// Reset.
type layerTransfer struct {
	t        *engine.Transfer
	patterns []engine.Pattern
	msg      []byte
}

func (l *groupLine) take() (*layerTransfer, error) {
	l.mu.Lock()
	if n := len(l.idle); n > 0 {
		t := l.idle[n-1]
		l.idle = l.idle[:n-1]
		l.mu.Unlock()
		return t, nil
	}
	l.mu.Unlock()
	t, err := l.eng.NewTransfer(l.peer, l.op, l.route)
	return &layerTransfer{t: t}, err
}

// give takes a transfer back. One that failed is closed instead: the engine may have given it up.
func (l *groupLine) give(t *layerTransfer, err error) {
	if err != nil || t.t.Reset() != nil {
		_ = t.t.Close() // the outcome was reported already
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = append(l.idle, t)
}

// moor keeps an import of an ended lease until the next one.
func (l *groupLine) moor(remotes []*engine.Remote) {
	for i, r := range remotes {
		if r == nil {
			continue
		}
		l.mu.Lock()
		before := l.anchors[i]
		l.anchors[i] = r
		l.mu.Unlock()
		if before != nil {
			_ = before.Close() // its lease has ended
		}
	}
}

func (l *groupLine) close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, t := range l.idle {
		errs = append(errs, t.t.Close())
	}
	for _, r := range l.anchors {
		if r != nil {
			errs = append(errs, r.Close())
		}
	}
	l.idle, l.anchors = nil, nil
	return errors.Join(errs...)
}

// fill lists the patterns of one layer of an edge. local is the side that moves them.
func (t *layerTransfer) fill(e *layout.Edge, layer int, from, to layout.Tables, s layout.Span,
	local []*engine.Region, remote []*engine.Remote) (err error) {
	if t.patterns, err = e.Layer(t.patterns[:0], layer, from, to, s); err != nil {
		return err
	}
	for _, p := range t.patterns {
		if int(p.RemoteKey) >= len(remote) || remote[p.RemoteKey] == nil {
			return garbled("no lease of region %d", p.RemoteKey)
		}
		if err := t.t.AddPattern(local[p.LocalKey], remote[p.RemoteKey], p); err != nil {
			return err
		}
	}
	return nil
}

// groupLease is the lease of what one request has in one region of this rank.
type groupLease struct {
	region int
	lease  *engine.Lease
}

// lease leases the blocks of a request out, with one token for each region.
func (r *rank) lease(t layout.Tables, s layout.Span, o engine.LeaseOptions) ([]groupLease, error) {
	var list []groupLease
	for i, region := range r.cfg.Regions {
		ranges, err := r.side.Ranges(i, t, s)
		if err == nil && len(ranges) > 0 {
			var l *engine.Lease
			if l, err = leaseRanges(region, ranges, o); err == nil {
				list = append(list, groupLease{i, l})
				continue
			}
		}
		if err != nil {
			return list, fmt.Errorf("lease region %d out: %w", i, err)
		}
	}
	return list, nil
}

// leaseRanges leases scattered ranges out with one token, whose offsets are the region's.
func leaseRanges(r *engine.Region, ranges []layout.Range, o engine.LeaseOptions) (*engine.Lease,
	error) {
	return r.Lease(0, r.Size(), o)
}

// errUnrevoked is what a rank learns whose blocks a peer may still reach.
var errUnrevoked = fmt.Errorf("a lease could not be revoked: its blocks must not be used again: %w",
	engine.ErrUnproven)

// revoke ends leases, and returns nil once it is proven that nothing goes through any of them.
func (r *rank) revoke(leases []groupLease) error {
	errs := make([]error, len(leases))
	var all sync.WaitGroup
	for i := range leases {
		all.Go(func() {
			for range revokeTries {
				ctx, cancel := context.WithTimeout(context.Background(), r.cfg.RevokeTimeout)
				errs[i] = leases[i].lease.Revoke(ctx)
				cancel()
				if errs[i] == nil {
					return
				}
			}
			r.count.quarantined.Add(1)
			errs[i] = errors.Join(errUnrevoked, errs[i])
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// importAll imports the leases of a peer, by region. It looks between two imports whether the
// request goes on: each may wait for an answer.
func importAll(ctx context.Context, p *engine.Peer, tokens []token, regions int) (
	[]*engine.Remote, error) {
	remotes := make([]*engine.Remote, regions)
	for _, t := range tokens {
		if ctx.Err() != nil {
			return remotes, context.Cause(ctx)
		}
		if t.region >= regions || remotes[t.region] != nil {
			return remotes, garbled("a lease of region %d of %d", t.region, regions)
		}
		var err error
		if remotes[t.region], err = p.Import(t.lease); err != nil {
			return remotes, fmt.Errorf("import the lease of region %d: %w", t.region, err)
		}
	}
	return remotes, nil
}
