// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/driver"
)

// pin is a range of host memory that is pinned, or the reason why it is not.
type pin struct {
	mem     []byte
	base    uint64
	users   int    // guarded by pinTable.mu
	ours    bool   // this package has pinned it, not the program
	why     string // why it is not pinned; empty: it is
	release func() // result of driver.Holder.Hold; may be nil
}

func (p *pin) pinned() bool { return p.why == "" }

// pinTable finds pinned ranges by address. A registration within a pinned range shares the pin,
// whichever backend of the process made it.
type pinTable struct {
	mu   sync.Mutex
	list []*pin // short, so searched linearly: parts of a pinned range share its pin
}

// pins is the table of the whole process, since libcuda is loaded once.
var pins pinTable

// use pins a range, or adds a user to a pin that covers it; unuse undoes that. If the memory is a
// driver.Holder, use also holds its pages, pinned or not, so that copies do not go to old pages.
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
		return p, nil // not listed: pinning a part of it may succeed later
	}
	t.list = append(t.list, p)
	return p, nil
}

// attempt pins the range, or finds that the program has pinned it.
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

// unuse ends one use. If the CUDA driver fails to unpin the range, it stays in the table and its
// pages stay held, until the next call or abandon.
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

// abandon ends the last use of a range that the CUDA driver failed to unpin. The caller destroys
// the context next, which unpins it.
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

// hostAddress returns the address of pinned memory on a device, for kernels.
func (m *memory) hostAddress(d *device) (uint64, error) {
	at, err := d.mover.HostAddress(m.pin.mem)
	return at + (m.base - m.pin.base), err
}
