// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/sluicehq/sluice/csrc/cufile"
	"github.com/sluicehq/sluice/driver"
)

// buffer is a range of memory that is registered with cuFile, or the reason why it is not.
type buffer struct {
	device int
	at, n  uint64
	users  int    // guarded by bufferTable.mu
	why    string // why it is not registered; empty: it is
}

func (u *buffer) registered() bool { return u.why == "" }

// bufferTable finds registered ranges by address. cuFile accepts a base address only once, so a
// range that lies within a registered one shares that registration, whichever backend of the
// process made it.
type bufferTable struct {
	mu    sync.Mutex
	list  []*buffer
	bytes uint64
}

// buffers is the table of the whole process, since the library is loaded once.
var buffers bufferTable

// use registers a range, or adds a user to a registration that covers it; unuse undoes that. If
// cuFile refuses the range, it copies through its own staging buffers.
func (t *bufferTable) use(m *mover, seg *driver.Segment) (*buffer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := seg.Addr
	for _, u := range slices.Clone(t.list) {
		if u.users == 0 && u.at < at+seg.Len && at < u.at+u.n {
			if err := t.end(m, u); err != nil { // the addresses may be of other memory by now
				return nil, fmt.Errorf("cuFile keeps memory that was closed here: %w", err)
			}
			continue
		}
		if u.at <= at && at-u.at <= u.n && u.n-(at-u.at) >= seg.Len {
			u.users++
			return u, nil
		}
	}
	u := &buffer{device: seg.Device, at: at, n: seg.Len, users: 1}
	if u.why = t.attempt(m, u); !u.registered() {
		return u, nil // not listed: registering a part of it may succeed later
	}
	t.list = append(t.list, u)
	t.bytes += u.n
	return u, nil
}

func (t *bufferTable) attempt(m *mover, u *buffer) string {
	if u.n > m.cfg.BufferMax-min(t.bytes, m.cfg.BufferMax) {
		return fmt.Sprintf("Config.BufferMax, or max_device_pinned_mem_size of cufile.json, is %s",
			size(m.cfg.BufferMax))
	}
	err := m.c.Register(u.device, u.at, u.n)
	var said *cufile.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &said) && said.Code == cufile.AlreadyRegistered:
		return "a part of it is registered already, which cuFile does not extend: register the " +
			"largest range first"
	}
	return err.Error()
}

// unuse ends one use. If cuFile fails to deregister the range, it stays listed with no user.
func (t *bufferTable) unuse(m *mover, u *buffer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	// After an error the caller may call unuse again, and use may have deregistered the range
	// since.
	u.users = max(u.users-1, 0)
	if u.users > 0 || !u.registered() || !slices.Contains(t.list, u) {
		return nil
	}
	return t.end(m, u)
}

// end deregisters a range.
func (t *bufferTable) end(m *mover, u *buffer) error {
	if err := m.c.Deregister(u.device, u.at); err != nil {
		return err
	}
	t.list = slices.DeleteFunc(t.list, func(other *buffer) bool { return other == u })
	t.bytes -= u.n
	return nil
}
