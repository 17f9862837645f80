// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// Revoke implements driver.Memory. The proof is that the NICs forget the memory's keys, which is a
// call of our own kernel: no peer, frozen, dead or cut off, has a hand in it. A NIC may give a key
// out again: see addresses. Peers that know the keys are told that they are void, so that they
// stop by themselves and not by a queue pair that breaks.
//
// Once the backend's Close has begun, that Close looks for the proof.
func (m *memory) Revoke(ctx context.Context) error {
	m.end()
	if m.b.gate.Enter() {
		err := m.revoke(ctx)
		m.b.gate.Exit()
		if err == nil || ctx.Err() != nil || !m.b.gate.IsShut() {
			return err
		}
	}
	if m.gone.Load() {
		return nil
	}
	select {
	case <-m.b.closed:
	case <-ctx.Done():
		return fmt.Errorf("revoke memory: its backend is being closed: %w",
			driver.ContextError(ctx))
	}
	if m.gone.Load() {
		return nil
	}
	return m.b.closeErr
}

// busyPause is between two looks at memory that a batch of our own works on.
const busyPause = time.Millisecond

// revoke is Revoke within the gate; the epoch has ended. Where another call has the turn for longer
// than ctx, this one goes on beside: the NICs must forget the keys all the same.
func (m *memory) revoke(ctx context.Context) error {
	if err := m.turn.Take(ctx); err != nil {
		m.b.tasks.Start(func() {
			_ = m.turn.Take(context.Background()) // never fails
			defer m.turn.Give()
			_ = m.prove(context.Background()) // the next call looks for the proof again
		})
		return fmt.Errorf("revoke memory: another call waits for the NIC: %w", err)
	}
	defer m.turn.Give()
	if err := m.prove(ctx); err != nil {
		return err
	}
	for {
		err := m.free()
		if !errors.Is(err, driver.ErrBusy) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", err, driver.ContextError(ctx))
		case <-m.b.closing:
			return err
		case <-time.After(busyPause):
		}
	}
}

// free has C forget the memory, and the NICs the pins of it. driver.ErrBusy: a batch of our own
// works on it. After an error it may be called again. Preconditions: m.turn is held, and the proof
// is there.
func (m *memory) free() error {
	if m.gone.Load() {
		return nil
	}
	if m.shown {
		if err := m.b.net.Unmap(m.key); err != nil {
			return fmt.Errorf("revoke memory: %w", err)
		}
		m.shown = false
	}
	if err := m.unpin(); err != nil {
		return fmt.Errorf("revoke memory: %w", err)
	}
	m.gone.Store(true)
	m.b.table.Free(m.key)
	return nil
}

// end has imports refused from now on, and tells the peers that know the keys.
func (m *memory) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.revoked {
		return
	}
	m.revoked = true
	news := &expired{key: m.key, epoch: m.epoch}
	for c := range m.peersWithKey {
		c.ch.send(news)
	}
}

// prove has the NICs forget the keys, unless they were asked to take no requests. When a NIC does
// not let go of a key, because requests with it are under way, the queue pairs of the peers that
// may have sent them end first: those of peers that have none any more have ended.
// ctx is looked at before they end, not before the NICs are told.
// Preconditions: m.turn is held, and the memory is revoked.
func (m *memory) prove(ctx context.Context) error {
	if !m.granted {
		return nil
	}
	err := m.b.net.Revoke(m.key)
	if err != nil && ctx.Err() == nil {
		m.mu.Lock()
		peers := slices.Collect(maps.Keys(m.peersWithKey))
		m.mu.Unlock()
		for _, c := range peers {
			_ = c.breakPairs() // the NIC says what is left
		}
		err = m.b.net.Revoke(m.key)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("revoke memory: the NIC keeps a key: %w", err),
			driver.ContextError(ctx))
	}
	m.granted = false
	m.b.addresses.release(m)
	m.mu.Lock()
	m.peersWithKey = nil
	m.mu.Unlock()
	return nil
}

// addresses gives each grant addresses of its own, by which the requests of peers name its bytes.
//
// A NIC gives the key of a registration that has ended to a later one, mlx5 to the next. Requests
// with that key may be under way still, since the network holds them, or be sent later, by a peer
// that stood still. The NIC refuses those whose addresses lie outside the registration that has
// the key now. So addresses are given out in order, and again only in the next round: it begins
// once the queue pairs of all peers that were told keys have ended, and leaves out what was granted
// when it began.
type addresses struct {
	renewing sync.Mutex // held by a grant that takes addresses, also while it begins a round

	mu      sync.Mutex // guards what follows; taken last
	end     uint64
	next    uint64
	granted map[*memory]area // that the NICs may know
	avoid   []area           // in order: of grants from before this round
}

// area is a range of addresses.
type area struct{ from, to uint64 }

const (
	// Areas begin at multiples of it: with pages of up to that size an address is as far within a
	// page as the memory's own.
	areaUnit     = 1 << 30
	addressesEnd = 1 << 62
)

// reserve gives a memory addresses for a grant, unless those of this round are used up.
func (a *addresses) reserve(m *memory) (at uint64, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	within := m.base % areaUnit
	size := (within + m.size + areaUnit - 1) / areaUnit * areaUnit
	for len(a.avoid) > 0 && a.avoid[0].from < a.next+size {
		a.next = max(a.next, a.avoid[0].to)
		a.avoid = a.avoid[1:]
	}
	if size > a.end || a.next > a.end-size {
		return 0, false
	}
	got := area{a.next, a.next + size}
	a.next = got.to
	a.granted[m] = got
	return got.from + within, true
}

// release notes that no NIC knows the grant of a memory any more.
func (a *addresses) release(m *memory) {
	a.mu.Lock()
	delete(a.granted, m)
	a.mu.Unlock()
}

// reserved lists the areas of grants, in order.
func (a *addresses) reserved() []area {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.granted), func(x, y area) int {
		return cmp.Compare(x.from, y.from)
	})
}

// startRound starts a round.
func (a *addresses) startRound(avoid []area) {
	a.mu.Lock()
	a.next, a.avoid = 0, avoid
	a.mu.Unlock()
}

// addressOfGrant chooses the addresses of a grant. In the end it has the queue pairs of all peers
// end, which make them anew: nothing that was sent for a grant that had ended before arrives then.
func (b *Backend) addressOfGrant(m *memory) (uint64, error) {
	b.addresses.renewing.Lock()
	defer b.addresses.renewing.Unlock()
	if at, ok := b.addresses.reserve(m); ok {
		return at, nil
	}
	lasting := b.addresses.reserved() // first: what ends from now on may have requests under way
	if err := b.endPairsOfKeyHolders(); err != nil {
		return 0, fmt.Errorf("begin the addresses of grants anew: %w", err)
	}
	b.addresses.startRound(lasting)
	if at, ok := b.addresses.reserve(m); ok {
		return at, nil
	}
	return 0, fmt.Errorf("no addresses for a grant of %d bytes: revoke leases: %w", m.size,
		driver.ErrFull)
}

// endPairsOfKeyHolders ends our queue pairs to all peers that were told a key.
func (b *Backend) endPairsOfKeyHolders() error {
	b.mu.Lock()
	holders := make([]*inbound, 0, len(b.accepted))
	for c := range b.accepted {
		if c.hasKeys.Load() {
			holders = append(holders, c)
		}
	}
	b.mu.Unlock()
	var errs []error
	for _, c := range holders {
		errs = append(errs, c.breakPairs())
	}
	return errors.Join(append(errs, b.endKeptLinks())...)
}

// keepLink notes a connection that has ended, but for a queue pair that a NIC keeps.
func (b *Backend) keepLink(l link) {
	b.mu.Lock()
	b.keptLinks = append(b.keptLinks, l)
	b.mu.Unlock()
}

// endKeptLinks tries again to end those.
func (b *Backend) endKeptLinks() (err error) {
	b.mu.Lock()
	kept := b.keptLinks
	b.keptLinks = nil
	b.mu.Unlock()
	for _, l := range kept {
		if e := l.Close(); e != nil {
			b.keepLink(l)
			err = errors.Join(err, e)
		}
	}
	return err
}
