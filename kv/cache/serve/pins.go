// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/hostmem"
	"github.com/sluicehq/sluice/kv/cache"
)

// Pin keeps blocks in the memory of the server's cache, for a client of the same host to read them
// in their places. Its methods may be called by any goroutine.
type Pin struct {
	c        *Client
	number   uint32
	mapping  *mapping
	outcomes []cache.Outcome
	blocks   [][]byte
	closed   bool // it uses its mapping no more; guarded by the mappings' lock
}

// mapping is the memory file of the server, mapped to read. It goes with its last user.
type mapping struct {
	path string
	id   [16]byte
	mem  []byte
	uses int // pins, and Views that run; guarded by mappings.mu
}

// mappings are those of a client.
type mappings struct {
	mu   sync.Mutex
	last *mapping
}

// Pin pins blocks as cache.Namespace.Pin does, for a ttl of up to what the server allows, and until
// the connection ends at the latest. The process must be one of the server's host that may read its
// memory file: an error says so where it may not. The caller closes it.
func (s *Space) Pin(ctx context.Context, keys []cache.Key, ttl time.Duration) (*Pin, error) {
	place := binary.LittleEndian.AppendUint64(nil, uint64(ttl))
	body, err := s.ask(ctx, kindPin, place, keys, nil)
	if len(body) == 0 {
		if err == nil {
			err = errGarbled
		}
		return nil, fmt.Errorf("pin: %w", err)
	}
	p := &Pin{c: s.c}
	r := &reader{p: body}
	p.number = r.u32()
	path := string(r.take(int(r.u16())))
	id := [16]byte(r.take(16))
	if err == nil {
		p.mapping, err = s.c.mappings.get(path, id)
	}
	for range keys {
		o, off, size := cache.Outcome(r.u8()), r.u64(), uint64(r.u32())
		p.outcomes = append(p.outcomes, o)
		var block []byte
		if err == nil && size > 0 {
			mem := p.mapping.mem
			if off > uint64(len(mem)) || size > uint64(len(mem))-off {
				err = errGarbled
				break
			}
			block = mem[off:][:size:size]
		}
		p.blocks = append(p.blocks, block)
	}
	if err == nil && r.bad {
		err = errGarbled
	}
	if err != nil {
		soon, cancel := context.WithTimeout(context.Background(), cancelGrace)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("pin: %w", err), p.Close(soon))
	}
	return p, nil
}

// Outcomes says of each block whether it is pinned: cache.Done.
func (p *Pin) Outcomes() []cache.Outcome { return p.outcomes }

// View calls f with the bytes of the blocks, nil for one that is not pinned, and asks the server
// behind it whether they were there all the time. An error that is cache.ErrPinEnded says that they
// may not have been, and any other one that it is not known: then what f has read is of no use.
// Memory that is gone ends f with driver.ErrFault, where f reads it in this goroutine by Go code.
func (p *Pin) View(ctx context.Context, f func(blocks [][]byte) error) error {
	if p.mapping == nil || !p.c.mappings.use(p.mapping) {
		return cache.ErrPinEnded
	}
	defer p.c.mappings.put(p.mapping)
	if err := p.show(f); err != nil {
		return err
	}
	body, err := p.c.ask(ctx, kindPinned, binary.LittleEndian.AppendUint32(nil, p.number))
	switch {
	case err != nil:
		return fmt.Errorf("view: %w", err)
	case len(body) != 1 || body[0] != 1:
		return cache.ErrPinEnded
	}
	return nil
}

func (p *Pin) show(f func(blocks [][]byte) error) (err error) {
	defer hostmem.CatchFault(&err, hostmem.PanicOnFault())
	return f(p.blocks)
}

// Close ends the pin.
func (p *Pin) Close(ctx context.Context) error {
	p.c.mappings.drop(p)
	_, err := p.c.ask(ctx, kindUnpin, binary.LittleEndian.AppendUint32(nil, p.number))
	if err != nil && !errors.Is(err, engine.ErrPeerLost) { // which ends it, too
		return fmt.Errorf("unpin: %w", err)
	}
	return nil
}

// get maps a memory file, or gives the mapping that is there, for a pin.
func (m *mappings) get(path string, id [16]byte) (*mapping, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if at := m.last; at != nil && at.uses > 0 && at.path == path && at.id == id {
		at.uses++
		return at, nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open the memory file of the server, which a pin needs; Load needs "+
			"none: %w", err)
	}
	defer func() { _ = f.Close() }()
	var have [16]byte
	if _, err := f.ReadAt(have[:], cache.MemoryIDOff); err != nil {
		return nil, fmt.Errorf("read the memory file of the server: %w", err)
	}
	if have != id {
		return nil, fmt.Errorf("%s is not the memory file of the server: is it of this host? %w",
			path, engine.ErrBounds)
	}
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	mem, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, os.NewSyscallError("mmap", err)
	}
	m.last = &mapping{path: path, id: id, mem: mem, uses: 1}
	return m.last, nil
}

// use counts a View in, unless the mapping is gone.
func (m *mappings) use(at *mapping) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if at.uses == 0 {
		return false
	}
	at.uses++
	return true
}

func (m *mappings) put(at *mapping) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if at.uses--; at.uses == 0 {
		_ = unix.Munmap(at.mem)
		at.mem = nil
	}
}

// drop ends a pin's use of its mapping, once.
func (m *mappings) drop(p *Pin) {
	m.mu.Lock()
	first := p.mapping != nil && !p.closed
	p.closed = true
	m.mu.Unlock()
	if first {
		m.put(p.mapping)
	}
}

// Hint has the server's cache heed a hint.
func (s *Space) Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (r cache.HintResult,
	err error) {
	place := binary.LittleEndian.AppendUint64([]byte{byte(h.Kind)}, uint64(h.For))
	body, err := s.ask(ctx, kindHint, place, keys, nil)
	return r, errors.Join(err, fromJSON(body, &r))
}

// HintEnvelope has the server's cache heed an envelope of hints, as cache.Namespace.HintEnvelope.
func (s *Space) HintEnvelope(ctx context.Context, data []byte) (list []cache.ActionOutcome,
	err error) {
	p := binary.LittleEndian.AppendUint16(nil, s.number)
	body, err := s.c.ask(ctx, kindEnvelope, append(p, data...))
	return list, errors.Join(err, fromJSON(body, &list))
}

// Prefetch has the server's cache bring blocks into its memory.
func (s *Space) Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error) {
	body, err := s.ask(ctx, kindPrefetch, nil, keys, nil)
	if len(body) != len(keys) {
		if err == nil {
			err = errGarbled
		}
		return nil, err
	}
	list := make([]cache.Outcome, len(keys))
	for k := range list {
		list[k] = cache.Outcome(body[k])
	}
	return list, err
}

// Estimate says what a Load of blocks would take the server's cache; the way from there to this
// process is in the rate of copies.
func (s *Space) Estimate(ctx context.Context, keys []cache.Key) (e cache.Estimate, err error) {
	body, err := s.ask(ctx, kindEstimate, nil, keys, nil)
	return e, errors.Join(err, fromJSON(body, &e))
}

// Events waits until something has happened to blocks of namespaces that this client has opened,
// from its first call on, and returns that: up to 256 events, of which up to 4,096 wait between two
// calls. One call waits at a time. When ctx ends first it may return some and no error.
func (c *Client) Events(ctx context.Context) (list []cache.Event, err error) {
	body, err := c.ask(ctx, kindEvents, nil)
	if no := fromJSON(body, &list); len(list) > 0 {
		return list, nil
	} else if err == nil {
		err = no
	}
	return nil, err
}

func fromJSON(body []byte, v any) error {
	if len(body) == 0 {
		return nil // an error stands in its place
	}
	if json.Unmarshal(body, v) != nil {
		return errGarbled
	}
	return nil
}
