// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"slices"
	"sort"
	"sync"
	"syscall"

	"github.com/sluicehq/sluice/csrc"
)

// pinned is a range that the NICs know for local use, on all rails.
type pinned struct {
	from, to uint64
	readOnly bool  // the NICs must not write to it
	pins     []pin // by rail; nil: its device is gone
	users    int   // pinnings.mu
}

// pinnings finds ranges that are pinned by address: a registration that is a part of
// another one uses what that one pinned, and costs no call of the kernel.
type pinnings struct {
	b *Backend

	mu      sync.Mutex
	list    []*pinned // by from
	longest uint64    // that ever was: bounds the search
}

// use returns a range that holds mem, with one more user. unuse ends that.
func (t *pinnings) use(mem []byte, readOnly bool) (*pinned, error) {
	from := addressOf(mem)
	to := from + uint64(len(mem))
	if p := t.find(from, to, readOnly); p != nil {
		return p, nil
	}
	if err := t.b.locked.check(uint64(len(mem)), len(t.b.rails)); err != nil {
		return nil, err
	}
	p := &pinned{from: from, to: to, users: 1}
	var err error
	p.pins, err = t.b.pinAll(mem, 0)
	if errors.Is(err, syscall.EFAULT) || errors.Is(err, syscall.EPERM) || errors.Is(err, syscall.EACCES) {
		if !readOnly {
			return nil, err
		}
		p.readOnly = true // pages that the program itself may not write
		p.pins, err = t.b.pinAll(mem, csrc.VerbsReadOnly)
	}
	if err != nil {
		return nil, t.b.locked.explain(err, uint64(len(mem)), len(t.b.rails))
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = slices.Insert(t.list, t.after(from), p)
	t.longest = max(t.longest, to-from)
	return p, nil
}

// after returns the index of the first range that begins past an address.
// Preconditions: t.mu is held.
func (t *pinnings) after(from uint64) int {
	return sort.Search(len(t.list), func(i int) bool { return t.list[i].from > from })
}

func (t *pinnings) find(from, to uint64, readOnly bool) *pinned {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := t.after(from) - 1; i >= 0 && t.list[i].from+t.longest >= to; i-- {
		if p := t.list[i]; p.to >= to && (readOnly || !p.readOnly) {
			p.users++
			return p
		}
	}
	return nil
}

func (t *pinnings) unuse(p *pinned) error {
	t.mu.Lock()
	p.users--
	last := p.users == 0
	if last {
		t.list = slices.DeleteFunc(t.list, func(other *pinned) bool { return other == p })
	}
	t.mu.Unlock()
	if !last {
		return nil
	}
	return closePins(p.pins)
}

func closePins(pins []pin) error {
	var errs []error
	for _, p := range pins {
		if p != nil {
			errs = append(errs, p.Close())
		}
	}
	return errors.Join(errs...)
}

// pinAll pins a range on all rails at once: large ranges take long.
func (b *Backend) pinAll(mem []byte, flags uint32) ([]pin, error) {
	if b.cfg.RelaxedOrdering {
		flags |= csrc.VerbsRelaxed
	}
	pins := make([]pin, len(b.rails))
	err := b.onRails(func(r *rail) (err error) {
		pins[r.index], err = b.net.pin(r.index, mem, flags)
		return err
	})
	if err != nil {
		return nil, errors.Join(err, closePins(pins))
	}
	return pins, nil
}

// onRails does something on each rail that is there, at once where there are several.
func (b *Backend) onRails(do func(r *rail) error) error {
	errs := make([]error, len(b.rails))
	attempt := func(i int, r *rail) {
		if !r.gone.Load() {
			errs[i] = do(r)
		}
		if r.gone.Load() {
			errs[i] = nil // it went meanwhile: the others serve
		}
	}
	var wg sync.WaitGroup
	for i, r := range b.rails[1:] {
		wg.Go(func() { attempt(i+1, r) })
	}
	attempt(0, b.rails[0])
	wg.Wait()
	return errors.Join(errs...)
}
