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

// Revoke implements driver.Memory. The proof is that the local kernel deregisters the memory's
// remote keys. No peer takes part in that, so a frozen, dead or disconnected peer cannot delay it.
// A NIC may use a key again: see addresses. Revoke also tells the peers that have the keys, so that
// they stop using them; otherwise their queue pairs would fail.
//
// After the backend's Close has begun, Revoke waits for that Close to revoke the memory.
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

// busyPause is the time between two attempts to free memory that a batch of this backend uses.
const busyPause = time.Millisecond

// revoke is Revoke inside the gate, after the end of the epoch. It unlocks revokeLock in pauses:
// imports that were let in before must not wait for a batch.
func (m *memory) revoke(ctx context.Context) error {
	for {
		if err := m.revokeLock.Lock(ctx); err != nil {
			m.proveBeside()
			return fmt.Errorf("revoke memory: another call waits for the NIC: %w", err)
		}
		err := m.prove(ctx)
		proved := err == nil
		if proved {
			err = m.free()
		}
		m.revokeLock.Unlock()
		if !proved || !errors.Is(err, driver.ErrBusy) {
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

// proveBeside is for a call whose context is over before it has revokeLock: the NICs must forget
// the keys all the same. One goroutine is enough for any number of calls.
func (m *memory) proveBeside() {
	if !m.proving.CompareAndSwap(false, true) {
		return
	}
	started := m.b.tasks.Start(func() {
		_ = m.revokeLock.Lock(context.Background()) // never fails
		_ = m.prove(context.Background())           // the next call looks for the proof again
		m.proving.Store(false)
		m.revokeLock.Unlock()
	})
	if !started {
		m.proving.Store(false)
	}
}

// free removes the memory from csrc/verbs, unpins it, and frees its key. The error is
// driver.ErrBusy while a batch of this backend uses the memory. After an error it may be called
// again. Preconditions: m.revokeLock is held, and prove has succeeded.
func (m *memory) free() error {
	if m.gone.Load() {
		return nil
	}
	if m.mapped {
		if err := m.b.net.Unmap(m.key); err != nil {
			return fmt.Errorf("revoke memory: %w", err)
		}
		m.mapped = false
	}
	if err := m.unpin(); err != nil {
		return fmt.Errorf("revoke memory: %w", err)
	}
	m.gone.Store(true)
	m.b.table.Free(m.key)
	return nil
}

// end refuses imports from now on, and tells the peers that have remote keys.
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

// prove deregisters the remote keys, if there was a grant. If a NIC does not release a key because
// requests with it are under way, prove ends the queue pairs of all peers that have the key, and
// tries again. It does not end them if ctx has ended.
// Preconditions: m.revokeLock is held, and the memory is revoked.
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
			_ = c.breakPairs() // if a queue pair is left, the Revoke below fails
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

// addresses allocates a separate range of remote addresses for each grant. Peers use these in their
// requests.
//
// A NIC may give the key of an ended registration to a later one; mlx5 gives it to the next. Old
// requests with that key may still arrive: the network may have delayed them, or a frozen peer may
// send them later. The NIC refuses a request whose address is outside the registration that has the
// key now. So addresses are allocated in ascending order and not reused within a round. A new round
// begins after the queue pairs of all peers with keys have ended. It skips the ranges that were
// granted when it began.
type addresses struct {
	renewing sync.Mutex // held while a grant allocates addresses or begins a round

	mu      sync.Mutex // guards what follows; the last lock in the order
	end     uint64
	next    uint64
	granted map[*memory]area // ranges that the NICs may accept
	avoid   []area           // ranges granted before this round, in order
}

// area is a range of addresses.
type area struct{ from, to uint64 }

const (
	// The size of an area is a multiple of this. A granted address equals the memory's own modulo
	// areaUnit, so both have the same offset in a page of any size up to that.
	areaUnit     = 1 << 30
	addressesEnd = 1 << 62
)

// reserve allocates addresses for a grant of a memory. It returns false if this round has too few
// left.
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

// release notes that no NIC accepts the grant of a memory any more.
func (a *addresses) release(m *memory) {
	a.mu.Lock()
	delete(a.granted, m)
	a.mu.Unlock()
}

// reserved returns the areas of all grants, in order.
func (a *addresses) reserved() []area {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.granted), func(x, y area) int {
		return cmp.Compare(x.from, y.from)
	})
}

// startRound starts a round that skips the areas in avoid.
func (a *addresses) startRound(avoid []area) {
	a.mu.Lock()
	a.next, a.avoid = 0, avoid
	a.mu.Unlock()
}

// addressOfGrant allocates addresses for a grant. If none are left, it begins a new round: it ends
// the queue pairs of all peers that have keys, so that no request for an ended grant can arrive.
// The peers then make new queue pairs.
func (b *Backend) addressOfGrant(m *memory) (uint64, error) {
	b.addresses.renewing.Lock()
	defer b.addresses.renewing.Unlock()
	if at, ok := b.addresses.reserve(m); ok {
		return at, nil
	}
	lasting := b.addresses.reserved() // before the queue pairs end: see addresses
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

// endPairsOfKeyHolders ends our queue pairs to all peers that have received a remote key.
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

// keepLink keeps a link whose Close failed because a NIC did not destroy a queue pair.
func (b *Backend) keepLink(l link) {
	b.mu.Lock()
	b.keptLinks = append(b.keptLinks, l)
	b.mu.Unlock()
}

// endKeptLinks tries again to close the kept links.
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
