// SPDX-License-Identifier: Apache-2.0

package handoff

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/kv/layout"
)

// groupLine keeps resources of one request to a peer for the next: idle transfers, and the last
// import of each region.
type groupLine struct {
	eng   *engine.Engine
	peer  *engine.Peer
	op    engine.Op
	route engine.Route
	class engine.Class

	mu            sync.Mutex
	idle          []*layerTransfer
	cachedImports map[int]*engine.Remote // by region of the peer
}

// layerTransfer is the transfer of one layer along one edge, with the slices that the transfer
// refers to until Reset.
type layerTransfer struct {
	t        *engine.Transfer
	patterns []engine.Pattern
	msg      []byte
}

// transfer returns an idle transfer, or makes one.
func (l *groupLine) transfer() (*layerTransfer, error) {
	l.mu.Lock()
	if n := len(l.idle); n > 0 {
		t := l.idle[n-1]
		l.idle = l.idle[:n-1]
		l.mu.Unlock()
		return t, nil
	}
	l.mu.Unlock()
	t, err := l.eng.NewTransfer(l.peer, l.op, l.route)
	if err != nil {
		return nil, err
	}
	if err := t.Schedule(l.class, time.Time{}); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return &layerTransfer{t: t}, nil
}

// putBack keeps a transfer for the next layer. It closes one that failed, since the engine may have
// given it up.
func (l *groupLine) putBack(t *layerTransfer, err error) {
	if err != nil || t.t.Reset() != nil {
		_ = t.t.Close() // the outcome was reported already
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = append(l.idle, t)
}

// keepLastImport keeps one import of each region until the next request has ended, and closes the
// others. A backend that maps the peer's memory may unmap it with the last import, and then each
// request pays for all its pages anew: a quarter of the speed.
func (l *groupLine) keepLastImport(list []groupImport) {
	for _, m := range list {
		l.mu.Lock()
		before := l.cachedImports[m.region]
		l.cachedImports[m.region] = m.remote
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
	for _, r := range l.cachedImports {
		errs = append(errs, r.Close())
	}
	l.idle, l.cachedImports = nil, nil
	return errors.Join(errs...)
}

// fill lists the patterns of one layer of an edge. local is the side that moves them.
func (t *layerTransfer) fill(e *layout.Edge, layer int, from, to layout.Tables, s layout.Span,
	local []*engine.Region, imports []groupImport) (err error) {
	if t.patterns, err = e.Layer(t.patterns[:0], layer, from, to, s); err != nil {
		return err
	}
	for _, p := range t.patterns {
		remote := find(imports, int(p.RemoteKey), layer)
		if remote == nil {
			return garbled("no lease of layer %d in region %d", layer, p.RemoteKey)
		}
		if err := t.t.AddPattern(local[p.LocalKey], remote, p); err != nil {
			return err
		}
	}
	return nil
}

// groupLease is the lease of the blocks of one request in one region, for some layers of this rank.
type groupLease struct {
	layerRange
	lease *engine.Lease
}

// layerRange says which layers of a region a lease covers: from first up to end, excluding end.
type layerRange struct{ region, first, end int }

// lease leases the blocks of a request to the other group. It makes one lease for each region or,
// if that would have too many ranges, several leases for some layers each.
func (r *rank) lease(t layout.Tables, s layout.Span, o engine.LeaseOptions) (list []groupLease,
	err error) {
	end := slices.Max(r.layers()) + 1
	for i := range r.cfg.Regions {
		if list, err = r.leaseLayers(list, layerRange{i, 0, end}, t, s, o); err != nil {
			return list, fmt.Errorf("lease region %d out: %w", i, err)
		}
	}
	bytes := 0
	for _, l := range list {
		bytes += len(l.lease.Token())
	}
	if bytes > groupTokensMax {
		return list, fmt.Errorf("leases of %d bytes, at most %d: use larger blocks, or a layout "+
			"that keeps the layers of a block together: %w", bytes, groupTokensMax,
			engine.ErrBounds)
	}
	return list, nil
}

func (r *rank) leaseLayers(list []groupLease, p layerRange, t layout.Tables, s layout.Span,
	o engine.LeaseOptions) ([]groupLease, error) {
	ranges, err := r.side.Ranges(p.region, p.first, p.end, t, s)
	if err != nil || len(ranges) == 0 {
		return list, err
	}
	if half := p.first + (p.end-p.first)/2; len(ranges) > r.rangesMax && half > p.first {
		list, err = r.leaseLayers(list, layerRange{p.region, p.first, half}, t, s, o)
		if err != nil {
			return list, err
		}
		return r.leaseLayers(list, layerRange{p.region, half, p.end}, t, s, o)
	}
	l, err := r.cfg.Regions[p.region].LeaseRanges(ranges, o)
	if err != nil {
		return list, err
	}
	return append(list, groupLease{p, l}), nil
}

// abort ends a transfer, and waits for its end, which the engine bounds. An error is
// ErrUnproven or ErrInUse.
func (t *layerTransfer) abort() error { return withoutProof(t.t.Abort(context.Background())) }

// withoutProof turns an error of Abort into ErrInUse, except for ErrUnproven: after that one the
// memory of this side is free, and only the peer may still get bytes.
func withoutProof(err error) error {
	if err == nil || errors.Is(err, engine.ErrUnproven) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrInUse, err)
}

// revokePause is the pause between two attempts of revokeWithin.
const revokePause = 20 * time.Millisecond

// revokeWithin revokes a lease, again and again until there is a proof or ctx is over: a writer
// that does not answer may only be late.
func revokeWithin(ctx context.Context, l *engine.Lease) error {
	for {
		err := l.Revoke(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(revokePause):
		}
	}
}

// revokeAtOnce is how many leases of a request revoke ends at the same time: with a peer that
// stands still each takes as long as the backend's grace.
const revokeAtOnce = 8

// revoke ends leases, and returns nil once it is proven that nothing goes through any of them.
func (r *rank) revoke(leases []groupLease) error {
	ctx, cancel := context.WithTimeout(context.Background(), r.cfg.RevokeTimeout)
	defer cancel()
	errs := make([]error, len(leases))
	var all sync.WaitGroup
	var next atomic.Int64
	for range min(revokeAtOnce, len(leases)) {
		all.Go(func() {
			for i := next.Add(1) - 1; int(i) < len(leases); i = next.Add(1) - 1 {
				errs[i] = revokeWithin(ctx, leases[i].lease)
			}
		})
	}
	all.Wait()
	var standing LeasesError
	for i, err := range errs {
		if err != nil {
			standing.Leases = append(standing.Leases, leases[i].lease)
			standing.Err = err // they have one cause
		}
	}
	if standing.Leases == nil {
		return nil
	}
	r.count.quarantined.Add(uint64(len(standing.Leases)))
	return &standing
}

// groupImport is an imported lease of a peer.
type groupImport struct {
	layerRange
	remote *engine.Remote
}

// importAll imports the leases of a rank of the other group. An import may wait for an answer, so
// importAll stops between two of them if the request has ended.
func (r *rank) importAll(ctx context.Context, other int, there places) (list []groupImport,
	err error) {
	if err := checkLeases(there.tokens, r.others[other]); err != nil {
		return nil, err
	}
	for _, t := range there.tokens {
		if ctx.Err() != nil {
			return list, context.Cause(ctx)
		}
		remote, err := r.cfg.Peers[other].Import(t.lease)
		if err != nil {
			return list, fmt.Errorf("import the lease of region %d: %w", t.region, err)
		}
		list = append(list, groupImport{t.layerRange, remote})
	}
	return list, nil
}

// checkLeases returns an error for leases that rank.lease does not make, of which no two have the
// same layer of a region. A token of a few bytes may name megabytes of ranges, so the number of
// tokens must be bounded.
func checkLeases(tokens []token, side *layout.Side) error {
	last := layerRange{}
	for _, t := range tokens {
		in := func(v layout.View) bool {
			return v.Region == t.region && v.Layer >= t.first && v.Layer < t.end
		}
		if t.region < last.region || t.region == last.region && t.first < last.end ||
			!slices.ContainsFunc(side.Views, in) {
			return garbled("a lease of layers %d to %d of region %d, behind one up to %d of %d",
				t.first, t.end, t.region, last.end, last.region)
		}
		last = t.layerRange
	}
	return nil
}

// find returns the import that has a layer of a region, or nil.
func find(list []groupImport, region, layer int) *engine.Remote {
	for _, m := range list {
		if m.region == region && layer >= m.first && layer < m.end {
			return m.remote
		}
	}
	return nil
}
