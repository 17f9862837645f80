// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

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

// take gives a memory addresses for a grant, unless those of this round are used up.
func (a *addresses) take(m *memory) (at uint64, ok bool) {
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

// giveBack notes that no NIC knows the grant of a memory any more.
func (a *addresses) giveBack(m *memory) {
	a.mu.Lock()
	delete(a.granted, m)
	a.mu.Unlock()
}

// all lists what is granted, in order.
func (a *addresses) all() []area {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.SortedFunc(maps.Values(a.granted), func(x, y area) int {
		return cmp.Compare(x.from, y.from)
	})
}

// begin starts a round.
func (a *addresses) begin(avoid []area) {
	a.mu.Lock()
	a.next, a.avoid = 0, avoid
	a.mu.Unlock()
}

// addressOfGrant chooses the addresses of a grant. In the end it has the queue pairs of all peers
// end, which make them anew: nothing that was sent for a grant that had ended before arrives then.
func (b *Backend) addressOfGrant(m *memory) (uint64, error) {
	b.addresses.renewing.Lock()
	defer b.addresses.renewing.Unlock()
	if at, ok := b.addresses.take(m); ok {
		return at, nil
	}
	lasting := b.addresses.all() // first: what ends from now on may have requests under way
	if err := b.endToldPairs(); err != nil {
		return 0, fmt.Errorf("begin the addresses of grants anew: %w", err)
	}
	b.addresses.begin(lasting)
	if at, ok := b.addresses.take(m); ok {
		return at, nil
	}
	return 0, fmt.Errorf("no addresses for a grant of %d bytes: revoke leases: %w", m.size,
		driver.ErrFull)
}

// endToldPairs ends our queue pairs to all peers that were told a key.
func (b *Backend) endToldPairs() error {
	b.mu.Lock()
	told := make([]*inbound, 0, len(b.accepted))
	for c := range b.accepted {
		c.knowing.Lock()
		if c.told {
			told = append(told, c)
		}
		c.knowing.Unlock()
	}
	b.mu.Unlock()
	var errs []error
	for _, c := range told {
		errs = append(errs, c.breakPairs())
	}
	return errors.Join(append(errs, b.endKept())...)
}

// keep notes a connection that has ended, but for a queue pair that a NIC keeps.
func (b *Backend) keep(l link) {
	b.mu.Lock()
	b.kept = append(b.kept, l)
	b.mu.Unlock()
}

// endKept tries again to end those.
func (b *Backend) endKept() (err error) {
	b.mu.Lock()
	kept := b.kept
	b.kept = nil
	b.mu.Unlock()
	for _, l := range kept {
		if e := l.Close(); e != nil {
			b.keep(l)
			err = errors.Join(err, e)
		}
	}
	return err
}
