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

// buffer is a range of memory that cuFile knows, or why it does not.
type buffer struct {
	kind    driver.Kind
	device  int
	at, n   uint64
	users   int    // bufferTable.mu
	why     string // not registered; empty: it is
	release func() // of a Holder; may be nil
}

func (u *buffer) registered() bool { return u.why == "" }

// bufferTable finds ranges that are registered by address: a registration that is a part of another
// one uses that, whichever backend of the process made it, since cuFile takes a base once.
type bufferTable struct {
	mu    sync.Mutex
	list  []*buffer
	bytes uint64
}

// buffers is one for the process, as the library is.
var buffers bufferTable

// use returns what is known of a range, with one more user. unuse ends that. What cuFile does not
// take is moved through buffers of its own.
func (t *bufferTable) use(b *Backend, seg *driver.Segment, at uint64) (*buffer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, u := range slices.Clone(t.list) {
		if u.users == 0 && u.at < at+seg.Len && at < u.at+u.n {
			if err := t.end(b, u); err != nil { // the addresses may be of other memory by now
				return nil, fmt.Errorf("cuFile keeps memory that was closed here: %w", err)
			}
			continue
		}
		if u.kind == seg.Kind && u.at <= at && at-u.at <= u.n && u.n-(at-u.at) >= seg.Len {
			u.users++
			return u, nil
		}
	}
	u := &buffer{kind: seg.Kind, device: seg.Device, at: at, n: seg.Len, users: 1}
	if h, ok := seg.Shared.(driver.Holder); ok && seg.Kind == driver.DRAM {
		release, err := h.Hold()
		if err != nil {
			return nil, fmt.Errorf("register host memory with cuFile: hold its pages: %w", err)
		}
		u.release = release
	}
	if u.why = t.attempt(b, u); !u.registered() {
		u.drop()
		return u, nil // not in the list: a part of it may have better luck
	}
	t.list = append(t.list, u)
	t.bytes += u.n
	return u, nil
}

func (t *bufferTable) attempt(b *Backend, u *buffer) string {
	if u.n > b.cfg.BufferMax-min(t.bytes, b.cfg.BufferMax) {
		return fmt.Sprintf("Config.BufferMax, or max_device_pinned_mem_size of cufile.json, is %s",
			size(b.cfg.BufferMax))
	}
	err := b.mover.Register(u.device, u.at, u.n)
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

func (u *buffer) drop() {
	if u.release != nil {
		u.release()
		u.release = nil
	}
}

// unuse ends one use. What cuFile does not give up stays listed, with no user, and its pages held.
func (t *bufferTable) unuse(b *Backend, u *buffer) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	// After an error it may be called again, and use may have ended the range since.
	u.users = max(u.users-1, 0)
	if u.users > 0 || !u.registered() || !slices.Contains(t.list, u) {
		return nil
	}
	return t.end(b, u)
}

// end has cuFile forget a range.
func (t *bufferTable) end(b *Backend, u *buffer) error {
	if err := b.mover.Deregister(u.device, u.at); err != nil {
		return err
	}
	t.list = slices.DeleteFunc(t.list, func(other *buffer) bool { return other == u })
	t.bytes -= u.n
	u.drop()
	return nil
}
