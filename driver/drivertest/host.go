// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// host is one side: a backend with its memory and its peers. It lives in the
// test's process or in the second one, and does the same there.
type host struct {
	h      Harness
	b      driver.Backend
	ledger *ledger
	conns  conns

	receiving sync.Mutex // held while receiving: Receive never runs twice at once

	parked atomic.Int64 // how often a goroutine has come to sleep on the backend's descriptor

	mu       sync.Mutex // guards what follows
	regions  []*region
	peers    []driver.Peer
	chore    *chore
	standing *standing
}

// region is one registration.
type region struct {
	space *Space
	off   uint64 // of the registration within the space
	owned bool   // the space is this region's to free
	seg   driver.Segment
	mem   driver.Memory
}

func openHost(h Harness) (*host, error) {
	b, err := h.New()
	if err != nil {
		return nil, err
	}
	return &host{h: h, b: b, ledger: &ledger{b: b}}, nil
}

// add allocates and registers memory and returns its number.
func (h *host) add(q request) (int, error) {
	space, err := h.allocator(q)(q.Len)
	if err != nil {
		return 0, fmt.Errorf("allocate %d bytes: %w", q.Len, err)
	}
	seg := space.Segment
	seg.ReadOnly = q.ReadOnly
	seg.Secret = secret()
	return h.register(&region{space: space, owned: true, seg: seg})
}

// allocator makes the memory that an order asks for.
func (h *host) allocator(q request) Allocator {
	switch {
	case q.Decay != "":
		return func(n uint64) (*Space, error) { return decaying(n, q.Decay) }
	case q.Remote:
		return h.h.Remote
	}
	return h.h.Local
}

// slice registers a part of a region once more.
func (h *host) slice(of int, off, n uint64, only driver.Ranges) (int, error) {
	whole := h.region(of)
	seg, err := whole.seg.Slice(off, n, secret())
	if err != nil {
		return 0, err
	}
	seg.Only = only
	return h.register(&region{space: whole.space, off: whole.off + off, seg: seg})
}

// again registers the bytes of a region once more.
func (h *host) again(id int) (int, error) {
	r := *h.region(id)
	r.owned, r.seg.Secret = false, secret()
	return h.register(&r)
}

func (h *host) register(r *region) (id int, err error) {
	if r.mem, err = h.b.Register(r.seg); err != nil {
		if r.owned {
			_ = r.space.free()
		}
		return 0, fmt.Errorf("register: %w", err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.regions = append(h.regions, r)
	return len(h.regions) - 1, nil
}

func secret() (s [16]byte) {
	_, _ = rand.Read(s[:]) // never fails
	return s
}

func (h *host) region(id int) *region {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.regions[id]
}

func (h *host) peer(id int) driver.Peer {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.peers[id]
}

func (h *host) token(id int) ([]byte, error) { return h.region(id).mem.AppendToken(nil) }

// set and get reach the bytes as their owner does, without the backend.
func (h *host) set(id int, off uint64, p []byte) error {
	r := h.region(id)
	_, err := r.space.bytes().WriteAt(p, int64(r.off+off))
	return err
}

func (h *host) get(id int, off, n uint64) ([]byte, error) {
	p, err := h.view(id, off, n)
	return append([]byte(nil), p...), err
}

// view is get without a copy, where that can be: the bytes may change.
func (h *host) view(id int, off, n uint64) ([]byte, error) {
	r := h.region(id)
	return r.space.view(r.off+off, n)
}

// paint fills a range as its owner would.
func (h *host) paint(id int, off, n, seed uint64) error {
	p, err := h.view(id, off, n)
	if err != nil {
		return err
	}
	paint(p, seed)
	if _, ok := h.region(id).space.bytes().(mapped); !ok {
		return h.set(id, off, p)
	}
	return nil
}

func (h *host) revoke(id int, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return h.region(id).mem.Revoke(ctx)
}

func (h *host) connect(addr []byte, limit time.Duration) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	p, err := h.b.Connect(ctx, addr)
	if err != nil {
		return 0, err
	}
	h.conns.opened(p)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.peers = append(h.peers, p)
	return len(h.peers) - 1, nil
}

// submit starts a batch, polling while the backend is full, and returns the tag.
func (h *host) submit(peer int, op driver.Op, descs []driver.Desc, msg []byte) (uint64, error) {
	b := &driver.Batch{Op: op, Descs: descs}
	if msg != nil {
		b.Tail, b.Notify = driver.NotifyTail, msg
	}
	return h.submitBatch(peer, b)
}

// submitBatch is submit of any batch.
func (h *host) submitBatch(peer int, b *driver.Batch) (uint64, error) {
	p := h.peer(peer)
	return h.start(func(tag uint64) error { return p.Submit(tag, b) })
}

// start gives a submission its tag and repeats it while the backend is full.
func (h *host) start(submit func(tag uint64) error) (uint64, error) {
	for wait := newPatience(h.h.Limit); ; {
		tag := h.ledger.tag()
		err := submit(tag)
		if err == nil {
			return tag, nil
		}
		h.ledger.refuse(tag)
		if !errors.Is(err, driver.ErrFull) {
			return 0, err
		}
		if _, err := h.ledger.poll(); err != nil {
			return 0, err
		}
		if !wait.more() {
			return 0, fmt.Errorf("submit while full: %w", errLate)
		}
	}
}

// close ends everything and reports what the ledger found.
func (h *host) close() []string {
	var faults []string
	h.goesOn() // a check that failed may have left it
	if _, err := h.endChore(0); err != nil {
		faults = append(faults, err.Error())
	}
	kept := h.h.kept()
	if err := within(h.h.Limit, h.b.Close); err != nil && h.h.kept() == kept {
		faults = append(faults, fmt.Sprintf("close backend: %v", err))
	} else {
		faults = append(faults, h.ledger.drain(h.h.Limit)...)
	}
	faults = append(faults, h.conns.list()...)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.regions {
		if !r.owned {
			continue
		}
		if err := errands.afterwards(r.space.free); err != nil {
			faults = append(faults, fmt.Sprintf("free memory: %v", err))
		}
	}
	return faults
}

// overdue counts the calls that within gave up: backends that are wrong on purpose wait for it.
var overdue atomic.Int64

// within runs f, but does not wait for longer than the limit. Past that f is an errand: memory
// stays until it returns.
func within(limit time.Duration, f func() error) error {
	result := make(chan error, 1)
	errands.run(func() { result <- f() })
	select {
	case err := <-result:
		return err
	case <-time.After(limit):
		overdue.Add(1)
		return errLate
	}
}
