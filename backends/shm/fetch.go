// SPDX-License-Identifier: Apache-2.0

package shm

import (
	"encoding/binary"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
)

// fetch is a request for the extents of an arena. While it is in peer.fetches, readMessages adds
// the parts of the owner's answer to it, under peer.mu. Once endFetch has removed it there, it
// belongs to refresh.
type fetch struct {
	size       uint64
	generation uint64
	extents    []driver.Extent // FD is an index in fds
	fds        []int
	done       chan error // has one place; endFetch sends nil if the answer is whole
}

// The bounds of an answer. A mapping is limited to what a process can map.
const (
	fdsMax       = 250      // SCM_MAX_FD of Linux is 253
	extentsMax   = 32 << 10 // twice the most that memory of hostmem has
	extentsPart  = 512      // most extents in one datagram: 14 KiB
	extentBytes  = 28
	arenaSizeMax = mappedBytesMax
)

// refresh asks the owner for the extents of the arena that a memory lies in, and maps them. All of
// it, from sending the request to the last part of the answer, may take Config.DialTimeout.
// Preconditions: the caller is between enter and exit.
func (p *peer) refresh(m *imported) error {
	f := &fetch{done: make(chan error, 1)}
	p.mu.Lock()
	if err := p.goneError(); err != nil {
		p.mu.Unlock()
		return err
	}
	id := p.fetchID
	p.fetchID++
	p.fetches[id] = f
	p.mu.Unlock()
	late, timer := clock.After(p.b.clock, p.b.cfg.DialTimeout)
	defer timer.Stop()
	request := append(binary.LittleEndian.AppendUint32([]byte{msgFetch}, id), m.token...)
	p.readerWG.Go(func() { p.sendControl(request) })

	var err error
	select {
	case err = <-f.done:
	case <-late:
		p.mu.Lock()
		p.endFetch(id, fmt.Errorf("ask for the memory's pages: no whole answer within %v, the "+
			"peer may be frozen: %w", p.b.cfg.DialTimeout, driver.ErrTimeout))
		p.mu.Unlock()
		err = <-f.done
	}
	defer func() { closeAll(f.fds) }() // a mapping keeps its memory without them
	if err != nil {
		return err
	}
	if m.off+m.size > f.size {
		return fmt.Errorf("memory of %d bytes at %d ends past its arena of %d: %w",
			m.size, m.off, f.size, driver.ErrCorrupt)
	}
	next, err := p.b.mapExtents(f)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	have := m.arena.mapping.Load()
	if m.arena.imports == 0 || have != nil && have.generation > next.generation {
		next.release()
		return nil
	}
	m.arena.replace(next)
	return nil
}

// endFetch ends a request with an error or nil, unless it has ended. Preconditions: p.mu is held.
func (p *peer) endFetch(id uint32, err error) {
	if f := p.fetches[id]; f != nil {
		delete(p.fetches, id)
		f.done <- err
	}
}

// failFetches ends all requests with an error.
func (p *peer) failFetches(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.fetches {
		p.endFetch(id, err)
	}
}

// goneError says why the owner answers nothing any more; nil: it still does.
func (p *peer) goneError() error {
	switch {
	case p.closing.Load():
		return driver.ErrClosed
	case p.lost.Load():
		return driver.ErrPeerLost
	}
	return nil
}

// addAnswer handles one part of an answer. It takes the descriptors over.
func (p *peer) addAnswer(body []byte, fds []int) error {
	if len(body) < answerHeadBytes-1 {
		closeAll(fds)
		return fmt.Errorf("answer of %d bytes: %w", len(body), driver.ErrCorrupt)
	}
	id := binary.LittleEndian.Uint32(body)
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.fetches[id]
	if f == nil {
		closeAll(fds)
		return nil // the request has ended without this answer
	}
	f.fds = append(f.fds, fds...)
	if more, err := f.addPart(body[4:]); !more || err != nil {
		p.endFetch(id, err)
	}
	return nil
}

// addPart reads one part of the answer and reports whether more must come.
func (f *fetch) addPart(b []byte) (more bool, err error) {
	if err := session.Status(b[0]).Err(); err != nil {
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

// park sets a job aside until the pages that it lacks are mapped anew. If the owner does not give
// them the job fails.
func (p *peer) park(j *job) {
	m := j.lacks
	p.mu.Lock()
	p.parked = append(p.parked, j)
	first := !m.arena.refreshing
	m.arena.refreshing = true
	p.mu.Unlock()
	if first {
		p.readerWG.Go(func() {
			err := p.refresh(m)
			p.mu.Lock()
			m.arena.refreshing = false
			jobs := p.parked
			p.parked = nil
			p.mu.Unlock()
			for _, j := range jobs {
				if err != nil && j.lacks == m {
					j.fail(err)
				}
				p.b.queue.push(j)
			}
		})
	}
	if p.goneError() != nil || j.isCancelled() {
		p.unpark()
	}
}

// unpark puts all parked jobs back into the queue. A job that still lacks pages is parked again.
func (p *peer) unpark() {
	p.mu.Lock()
	jobs := p.parked
	p.parked = nil
	p.mu.Unlock()
	for _, j := range jobs {
		p.b.queue.push(j)
	}
}
