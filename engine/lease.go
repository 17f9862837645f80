// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
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
	mems   []driver.Memory
	left   []driver.Memory // guarded by ending: those that are not closed
	token  []byte
	expiry *time.Timer

	ending  chan struct{} // a lock, full while the proof is sought
	ended   bool          // guarded by ending, as is expiry
	revoked chan struct{}
}

// Lease grants the range [off, off+n). Its token's offsets begin at 0. Whole
// pages are best: against a frozen holder, shm puts fresh pages under the range,
// and what else lies in its first and last page must then not be written at that
// moment.
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
	l := &Lease{e: r.e, region: r, off: off, n: seg.Len, ending: make(chan struct{}, 1),
		revoked: make(chan struct{})}
	if err := l.register(seg); err != nil {
		r.unuse()
		return nil, err
	}
	if o.TTL > 0 {
		l.expireAfter(o.TTL)
	}
	return l, nil
}

func (l *Lease) register(seg driver.Segment) error {
	mems, err := l.region.registerPart(seg)
	if err != nil {
		return err
	}
	l.mems, l.left = mems, slices.Clone(mems)
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
	if err == nil {
		err = l.e.addLease(l)
	}
	if err != nil {
		_ = l.e.fence(context.Background(), l.left)
		return &OpError{Op: "lease " + l.region.name, Err: err}
	}
	return nil
}

func (e *Engine) addLease(l *Lease) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return ErrClosed
	}
	if len(e.leases) >= e.cfg.LeasesMax {
		return fullError("leases", e.cfg.LeasesMax, "LeasesMax")
	}
	e.leases[l] = struct{}{}
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
// is no proof yet, and Revoke may be called again; new accesses are refused all
// the same. It is idempotent.
func (l *Lease) Revoke(ctx context.Context) error {
	select {
	case l.ending <- struct{}{}: // the epoch ends also where ctx is over
	default:
		select {
		case l.ending <- struct{}{}:
		case <-ctx.Done():
			return &OpError{Op: "revoke lease on " + l.region.name,
				Err: fmt.Errorf("another call revokes it and has no proof yet: %w", ctx.Err())}
		}
	}
	defer func() { <-l.ending }()
	if l.ended {
		return nil
	}
	if err := l.e.fence(ctx, l.left); err != nil {
		return err
	}
	l.ended = true
	if l.expiry != nil {
		l.expiry.Stop()
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

// expire revokes when the time is over, and tries again until it is proved.
func (l *Lease) expire() {
	if l.end(l.e.cfg.AbortGrace) != nil && !l.e.isClosing() {
		l.expireAfter(l.e.cfg.AbortGrace)
	}
}

func (l *Lease) expireAfter(d time.Duration) {
	l.ending <- struct{}{}
	defer func() { <-l.ending }()
	if l.ended {
		return // by Close, as it was made
	}
	l.expiry = time.AfterFunc(d, l.expire)
}
