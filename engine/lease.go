// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/wire"
)

// LeaseOptions say what a lease allows and for how long.
type LeaseOptions struct {
	TTL      time.Duration // 0: until it is revoked
	ReadOnly bool          // the holder may only read
}

// Lease is permission to reach some bytes of a region, for a holder of its token.
// It ends by Revoke or by its time, and then provably: no byte that the holder
// sends lands any more.
type Lease struct {
	e      *Engine
	region *Region
	off, n uint64
	left   []driver.Memory // guarded by ending: those that are not revoked
	token  []byte

	ending   session.ContextLock // held while the proof is sought
	ended    bool                // guarded by ending, as are the next two
	timer    *time.Timer         // of its time, or of the next look for the proof; nil: neither
	pause    time.Duration       // before that look
	retrying atomic.Bool         // the timer is of the next look
	unproven atomic.Bool         // Revoke has failed
	revoked  chan struct{}
}

// The pause before the engine looks again for a proof, which doubles each time: a look may cost the
// backend as long as it waits for a holder that does not answer.
const (
	revokeAgainMin = 100 * time.Millisecond
	revokeAgainMax = time.Minute
)

// Lease grants the range [off, off+n). Its token's offsets begin at 0. Have it begin and end at
// pages of the memory, which are of 2 MiB where those were reserved (see Alloc): against a holder
// that stands still in the middle of a write, shm has a proof by fresh pages, and puts none where
// the program may write beside the range in the same page. Revoke is ErrBusy there until the holder
// goes on or dies. Memory that cuda allocated has all of its block replaced all the same: what the
// program itself writes there at that moment, beside the range, may be lost.
func (r *Region) Lease(off, n uint64, o LeaseOptions) (*Lease, error) {
	seg, err := r.seg.Slice(off, n, [16]byte{})
	if err != nil {
		return nil, &OpError{Op: "lease " + r.name, Err: err}
	}
	return r.lease(seg, off, o)
}

// LeaseRanges grants several ranges of the region at once, such as the blocks of a request
// in all layers: they may overlap, and at most driver.RangesMax are left once those that touch
// are joined. Its token's offsets are the region's. What a holder asks for beside the ranges is
// ErrBounds: its own engine refuses it, and this side does where it places the bytes, or reads
// them (tcp, ucx, staged, mem). A peer that lies reaches the whole region over rdma, whose
// cards know nothing smaller than a registration, and over shm. While the holder stands still, shm
// has a proof of their end for at most 1,000 ranges, all of whole pages.
func (r *Region) LeaseRanges(ranges []Range, o LeaseOptions) (*Lease, error) {
	only, err := driver.NewRanges(ranges, r.seg.Len)
	if err != nil {
		return nil, &OpError{Op: "lease " + r.name, Err: err}
	}
	seg := r.seg
	seg.Only = only
	return r.lease(seg, 0, o)
}

func (r *Region) lease(seg driver.Segment, off uint64, o LeaseOptions) (*Lease, error) {
	if o.TTL < 0 {
		return nil, &OpError{Op: "lease " + r.name, Err: fmt.Errorf("a time of %v: %w", o.TTL,
			ErrBounds)}
	}
	seg.ReadOnly = seg.ReadOnly || o.ReadOnly
	if err := r.use(); err != nil {
		return nil, &OpError{Op: "lease", Err: err}
	}
	l := &Lease{e: r.e, region: r, off: off, n: seg.Len, ending: session.NewContextLock(),
		revoked: make(chan struct{})}
	if err := l.register(seg); err != nil {
		if l.left == nil {
			r.unuse()
		} // else Revoke does
		return nil, err
	}
	if o.TTL > 0 {
		_ = l.ending.Lock(context.Background())
		if !l.ended { // by Close, as it was made
			l.timer = time.AfterFunc(o.TTL, l.expire)
		}
		l.ending.Unlock()
	}
	return l, nil
}

func (l *Lease) register(seg driver.Segment) error {
	mems, err := l.region.registerPart(seg)
	if err != nil {
		return err
	}
	l.left = slices.Clone(mems) // the stager's memory looks at the first
	d := wire.Description{Engine: l.e.id, Host: l.e.host}
	for _, lane := range l.e.lanes {
		d.Backends = append(d.Backends, wire.Backend{Name: lane.caps.Name})
	}
	tokens, err := l.e.tokens(mems)
	if err == nil {
		d.Regions = []wire.Region{{Name: l.region.name, Kind: seg.Kind, ReadOnly: seg.ReadOnly,
			Size: seg.Len, Only: seg.Only}}
		d.Regions[0].Pack(tokens)
		l.token, err = wire.Encode(nil, &d)
	}
	l.e.mu.Lock()
	switch {
	case err != nil:
	case l.e.closed:
		err = ErrClosed
	case len(l.e.leases) >= l.e.cfg.LeasesMax:
		err = fullError("leases", l.e.cfg.LeasesMax, "LeasesMax")
	}
	l.e.leases[l] = struct{}{} // on an error perhaps one too many, for as long as Revoke fails
	l.e.mu.Unlock()
	if err != nil {
		_ = l.end(l.e.cfg.AbortGrace) // revokeLater, if a backend keeps a part
		return &OpError{Op: "lease " + l.region.name, Err: err}
	}
	return nil
}

// Token returns the bytes for the holder's Peer.Import. The holder must be
// connected already: a lease has no address.
func (l *Lease) Token() []byte { return l.token }

// Range returns offset and length within the region; of ranges, those of the region itself.
func (l *Lease) Range() (off, n uint64) { return l.off, l.n }

// Revoked is closed when the lease has ended and the proof is complete.
func (l *Lease) Revoked() <-chan struct{} { return l.revoked }

// Revoke ends the lease. When it returns nil no byte that the holder sends, or
// has sent, lands any more, whatever state the holder is in. On an error there
// is no proof yet; new accesses are refused all the same. Revoke may be called again, and need not
// be: the engine looks for the proof from time to time until it has it, and closes Revoked then. It
// is idempotent.
func (l *Lease) Revoke(ctx context.Context) error {
	if err := l.ending.Lock(ctx); err != nil {
		return &OpError{Op: "revoke lease on " + l.region.name,
			Err: fmt.Errorf("another call revokes it and has no proof yet: %w", err)}
	}
	defer l.ending.Unlock()
	if l.ended {
		return nil
	}
	if err := l.e.revoke(ctx, l.left); err != nil {
		l.revokeLater()
		return err
	}
	l.ended = true
	if l.timer != nil {
		l.timer.Stop()
	}
	l.region.unuse()
	l.e.mu.Lock()
	delete(l.e.leases, l)
	l.e.mu.Unlock()
	close(l.revoked)
	return nil
}

func (l *Lease) end(limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return l.Revoke(ctx)
}

// revokeLater makes the engine look for the proof later. Preconditions: l.ending is held.
func (l *Lease) revokeLater() {
	l.unproven.Store(true)
	if l.retrying.Load() || l.e.isClosing() {
		return
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	l.retrying.Store(true)
	l.pause = min(max(2*l.pause, revokeAgainMin), revokeAgainMax)
	l.timer = time.AfterFunc(l.pause, l.expire)
}

// expire is called when the time of the lease is over, or that of the next look for its proof.
func (l *Lease) expire() {
	l.retrying.Store(false)
	if !l.e.isClosing() { // Close looks itself
		_ = l.end(l.e.cfg.AbortGrace) // revokeLater, if there is none
	}
}

// endRevoked looks for the proof of those leases on a region that were revoked without one.
func (r *Region) endRevoked(ctx context.Context) error {
	r.e.mu.Lock()
	var leases []*Lease
	for l := range r.e.leases {
		if l.region == r && l.unproven.Load() {
			leases = append(leases, l)
		}
	}
	r.e.mu.Unlock()
	return inParallel(leases, func(l *Lease) error { return l.Revoke(ctx) })
}
