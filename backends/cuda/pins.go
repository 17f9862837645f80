// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// pin is a range of host memory that the driver knows, or why it does not.
type pin struct {
	mem     []byte
	base    uint64
	users   int    // pinTable.mu
	ours    bool   // ours to unpin
	why     string // not pinned; empty: it is
	release func() // of a Holder; may be nil
}

func (p *pin) pinned() bool { return p.why == "" }

// pinTable finds ranges that are pinned by address: a registration that is a part of another one
// uses what that one pinned, whichever backend of the process it was.
type pinTable struct {
	mu   sync.Mutex
	list []*pin // few: a part of a pinned range has none of its own
}

// pins is one for the process, as the driver is.
var pins pinTable

// use returns what is known of a range, with one more user. unuse ends that. The pages of
// memory that could change are held where they are, pinned or not: copies land in both.
func (t *pinTable) use(b *Backend, seg driver.Segment) (*pin, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	base := addressOf(seg.Mem)
	for _, p := range t.list {
		if p.base <= base && base+seg.Len <= p.base+uint64(len(p.mem)) {
			p.users++
			return p, nil
		}
	}
	p := &pin{mem: seg.Mem, base: base, users: 1}
	if h, ok := seg.Shared.(driver.Holder); ok {
		release, err := h.Hold()
		if err != nil {
			return nil, fmt.Errorf("pin host memory: hold its pages: %w", err)
		}
		p.release = release
	}
	p.attempt(b)
	if !p.pinned() {
		return p, nil // not in the table: a part of it may have better luck
	}
	t.list = append(t.list, p)
	return p, nil
}

// attempt pins the range, or finds out that the program has.
func (p *pin) attempt(b *Backend) {
	m := b.devices[0].mover
	switch err := m.Pin(p.mem); {
	case err == nil:
		p.ours = true
	case !errors.Is(err, driver.ErrBusy):
		p.why = err.Error()
	case !m.HostPinned(p.mem):
		p.why = "a part of it is pinned already, which the driver does not extend: register the " +
			"largest range first"
	}
}

// unuse ends one use. What the driver does not unpin stays in the table, and its pages held, until
// the next call or abandon.
func (t *pinTable) unuse(b *Backend, p *pin) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.users > 1 {
		p.users--
		return nil
	}
	if p.ours {
		if err := b.devices[0].mover.Unpin(p.mem); err != nil {
			return err
		}
	}
	t.remove(p)
	return nil
}

// abandon ends the last use of what the driver did not unpin: its context goes next.
func (t *pinTable) abandon(p *pin) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p.users--; p.users == 0 {
		t.remove(p)
	}
}

// Preconditions: t.mu is held.
func (t *pinTable) remove(p *pin) {
	p.users, p.ours = 0, false
	t.list = slices.DeleteFunc(t.list, func(other *pin) bool { return other == p })
	if p.release != nil {
		p.release()
		p.release = nil
	}
}

// hostAddress is where kernels of a device see pinned memory.
func (m *memory) hostAddress(d *device) (uint64, error) {
	at, err := d.mover.HostAddress(m.pin.mem)
	return at + (m.base - m.pin.base), err
}
