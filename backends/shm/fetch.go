// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
)

// fetch is a question for the extents of an arena. One that is in peer.fetches may be ended
// by any goroutine that takes it out; one that is not belongs to the goroutine that did.
type fetch struct {
	m          *imported
	size       uint64
	generation uint64
	extents    []driver.Extent // FD is an index in fds
	fds        []int
	done       chan error // nil for a parked job, else of one place
	deadline   int64      // of the whole answer
	timer      clock.Timer
}

// fetchError is why a parked job ends without its pages. A later job asks again after until.
type fetchError struct {
	err   error
	until int64 // 0: never
}

// fetchPause is for how long jobs end with the error of the one before.
const fetchPause = time.Second

// whyBroken is why there is no way to fresh pages of a memory; errStale: ask for them.
func (m *imported) whyBroken(now int64) error {
	b := m.broken.Load()
	switch {
	case b == nil:
		return errStale
	case b.until != 0 && now > b.until:
		m.broken.CompareAndSwap(b, nil)
		return errStale
	}
	return b.err
}

// What bounds an answer: a mapping is limited to what a process can map.
const (
	fdsMax       = 250      // SCM_MAX_FD of Linux is 253
	extentsMax   = 32 << 10 // hostmem's memory has half of that
	extentsPart  = 512      // in one datagram: 14 KiB
	extentBytes  = 28
	arenaSizeMax = mappedBytesMax
)

// refresh asks for the extents and waits for the answer.
func (p *peer) refresh(m *imported) error {
	done := make(chan error, 1)
	p.ask(m, done)
	return <-done
}

// ask sends the question. The answer goes to done, or wakes parked jobs; it is an error
// after Config.DialTimeout.
func (p *peer) ask(m *imported, done chan error) {
	f := &fetch{m: m, done: done}
	p.mu.Lock()
	id := p.fetchID
	p.fetchID++
	gone := p.gone()
	if gone == nil {
		p.fetches[id] = f
		f.deadline = p.b.clock.Now() + int64(p.b.cfg.DialTimeout)
		f.timer = p.b.clock.AfterFunc(p.b.cfg.DialTimeout, func() {
			if f := p.takeFetch(id); f != nil {
				p.end(f, p.lateAnswer())
			}
		})
	}
	p.mu.Unlock()
	if gone != nil {
		p.end(f, gone)
		return
	}
	msg := binary.LittleEndian.AppendUint32([]byte{msgFetch}, id)
	p.say(append(msg, m.token...))
}

func (p *peer) lateAnswer() error {
	return fmt.Errorf("ask for the memory's pages: no whole answer within %v, the peer may "+
		"be frozen: %w",
		p.b.cfg.DialTimeout, driver.ErrTimeout)
}

// gone is why no answer comes any more.
func (p *peer) gone() error {
	switch {
	case p.closing.Load():
		return driver.ErrClosed
	case p.lost.Load():
		return driver.ErrPeerLost
	}
	return nil
}

func (p *peer) takeFetch(id uint32) *fetch {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.fetches[id]
	delete(p.fetches, id)
	return f
}

// answered takes one part of an answer: id, status, generation, size, total,
// count, then extents. It owns fds.
func (p *peer) answered(body []byte, fds []int) error {
	if len(body) < 32 {
		closeAll(fds)
		return fmt.Errorf("answer of %d bytes: %w", len(body), driver.ErrCorrupt)
	}
	id := binary.LittleEndian.Uint32(body)
	f := p.takeFetch(id)
	if f == nil {
		closeAll(fds)
		return nil // the question has ended without this answer
	}
	f.fds = append(f.fds, fds...)
	more, err := f.take(body[4:])
	if more && err == nil {
		if err = p.awaitMore(id, f); err == nil {
			return nil
		}
	}
	if err == nil {
		err = p.install(f)
	}
	p.end(f, err)
	return nil
}

// awaitMore puts a question back for the next part. The timer may have come while the
// question was out, and found nothing: then the deadline is over.
func (p *peer) awaitMore(id uint32, f *fetch) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.gone(); err != nil {
		return err
	}
	if p.b.clock.Now() >= f.deadline {
		return p.lateAnswer()
	}
	p.fetches[id] = f
	return nil
}

// take reads one part and reports whether more must come.
func (f *fetch) take(b []byte) (more bool, err error) {
	if err := statusError(status(b[0])); err != nil {
		return false, err
	}
	f.generation, f.size = binary.LittleEndian.Uint64(b[4:]), binary.LittleEndian.Uint64(b[12:])
	total, count := binary.LittleEndian.Uint32(b[20:]), binary.LittleEndian.Uint32(b[24:])
	b = b[28:]
	if total == 0 || total > extentsMax || count == 0 || count > extentsPart ||
		len(b) != int(count)*extentBytes ||
		len(f.extents)+int(count) > int(total) || f.size == 0 || f.size > arenaSizeMax ||
		len(f.fds) > fdsMax {
		return false, fmt.Errorf("peer's extents: %w", driver.ErrCorrupt)
	}
	for ; len(b) > 0; b = b[extentBytes:] {
		f.extents = append(f.extents, driver.Extent{
			Off: binary.LittleEndian.Uint64(b), Len: binary.LittleEndian.Uint64(b[8:]),
			FDOff: binary.LittleEndian.Uint64(b[16:]), FD: int(binary.LittleEndian.Uint32(b[24:]))})
	}
	return len(f.extents) < int(total), nil
}

// install maps the answer in place of older pages.
func (p *peer) install(f *fetch) error {
	if f.m.off+f.m.size > f.size {
		return fmt.Errorf("memory of %d bytes at %d ends past its arena of %d: %w",
			f.m.size, f.m.off, f.size, driver.ErrCorrupt)
	}
	m, err := p.b.mapExtents(f)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	have := f.m.arena.mapping.Load()
	if f.m.arena.imports == 0 || have != nil && have.generation > m.generation {
		m.release()
		return nil
	}
	f.m.arena.retire(m)
	return nil
}

// end tells the caller of refresh, or parked jobs.
func (p *peer) end(f *fetch, err error) {
	if f.timer != nil {
		f.timer.Stop()
	}
	closeAll(f.fds)
	if f.done != nil {
		f.done <- err
		return
	}
	if err != nil {
		broken := &fetchError{err: err}
		if !final(err) {
			broken.until = p.b.clock.Now() + int64(fetchPause)
		}
		f.m.broken.Store(broken)
	}
	p.mu.Lock()
	f.m.arena.fetches = false
	p.mu.Unlock()
	p.unpark()
}

// final reports whether the pages will never come. Anything else, a lack of descriptors or of
// memory on either side, may pass.
func final(err error) bool {
	return errors.Is(err, driver.ErrRevoked) || errors.Is(err, driver.ErrBadToken) ||
		errors.Is(err, driver.ErrCorrupt)
}

// failFetches ends every question.
func (p *peer) failFetches(err error) {
	p.mu.Lock()
	all := p.fetches
	p.fetches = make(map[uint32]*fetch)
	p.mu.Unlock()
	for _, f := range all {
		p.end(f, err)
	}
}

// park sets a job aside until fresh pages are mapped.
func (p *peer) park(j *job) {
	m := j.waits
	p.mu.Lock()
	p.parked = append(p.parked, j)
	ask := !m.arena.fetches
	m.arena.fetches = true
	p.mu.Unlock()
	if ask {
		p.ask(m, nil)
	}
	if p.lost.Load() || p.closing.Load() || j.wanted() {
		p.unpark()
	}
}

// unpark puts all jobs back: one that still lacks pages parks again.
func (p *peer) unpark() {
	p.mu.Lock()
	jobs := p.parked
	p.parked = nil
	p.mu.Unlock()
	for _, j := range jobs {
		p.b.queue.push(j)
	}
}
