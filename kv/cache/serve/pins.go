// SPDX-License-Identifier: Apache-2.0

package serve

import (
	"cmp"
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
	outcomes []cache.Outcome
	blocks   [][]byte

	mu    sync.Mutex
	mem   []byte // the memory file, mapped to read; nil: no more
	views int    // that run
	ended bool
}

// Pin pins blocks as cache.Namespace.Pin does, for a ttl of at most Config.PinTTLMax of the server,
// and until the connection ends at the latest. The process must run on the server's host, come by
// its Unix socket, and may read its memory file: otherwise an error says so. The caller closes the
// pin.
func (s *Space) Pin(ctx context.Context, keys []cache.Key, ttl time.Duration) (_ *Pin, err error) {
	body, err := s.ask(ctx, kindPin, binary.LittleEndian.AppendUint64(nil, uint64(ttl)), keys, nil)
	if len(body) == 0 {
		return nil, fmt.Errorf("pin: %w", cmp.Or(err, errGarbled))
	}
	r := &reader{p: body}
	p := &Pin{c: s.c, number: r.u32()}
	path := string(r.take(int(r.u16())))
	id := [16]byte(r.take(16))
	if err == nil {
		err = p.mapFile(path, id)
	}
	for range keys {
		o, off, size := cache.Outcome(r.u8()), r.u64(), uint64(r.u32())
		var block []byte
		switch all := uint64(len(p.mem)); {
		case err != nil || size == 0:
		case r.bad || off > all || size > all-off:
			err = errGarbled
		default:
			block = p.mem[off:][:size:size]
		}
		p.outcomes, p.blocks = append(p.outcomes, o), append(p.blocks, block)
	}
	if err != nil {
		soon, cancel := context.WithTimeout(context.Background(), cancelGrace)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("pin: %w", err), p.Close(soon))
	}
	return p, nil
}

// mapFile maps the memory file of the server.
func (p *Pin) mapFile(path string, id [16]byte) error {
	// a pipe that somebody has put there is not waited for
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("open the memory file of the server, which a pin needs, and Load does "+
			"not: %w", err)
	}
	defer func() { _ = f.Close() }()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no file: %w", path, engine.ErrBounds)
	}
	if err != nil {
		return fmt.Errorf("the memory file of the server: %w", err)
	}
	var have [16]byte
	if _, err := f.ReadAt(have[:], cache.MemoryIDOff); err != nil {
		return fmt.Errorf("read the memory file of the server: %w", err)
	}
	if have != id {
		return fmt.Errorf("%s is not the memory file of the server: is it of this host? %w", path,
			engine.ErrBounds)
	}
	p.mem, err = unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	return os.NewSyscallError("mmap", err)
}

// Outcomes says of each block whether it is pinned: cache.Done.
func (p *Pin) Outcomes() []cache.Outcome { return p.outcomes }

// View calls f with the bytes of the blocks, nil for one that is not pinned, and asks the server
// behind it whether they were there all the time. cache.ErrPinEnded says that they may not have
// been, and any other error that it is not known: all that f has read is to be discarded then.
// Memory that is gone ends f with driver.ErrFault, where f reads it in this goroutine by Go code.
func (p *Pin) View(ctx context.Context, f func(blocks [][]byte) error) error {
	p.mu.Lock()
	if p.ended {
		p.mu.Unlock()
		return cache.ErrPinEnded
	}
	p.views++
	p.mu.Unlock()
	defer p.unmap(func() { p.views-- })
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

// unmap unmaps the file where, after a change, nothing uses it any more.
func (p *Pin) unmap(change func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if change(); p.ended && p.views == 0 && p.mem != nil {
		_ = unix.Munmap(p.mem)
		p.mem = nil
	}
}

// Close ends the pin. A View that runs keeps the mapping, but not the blocks.
func (p *Pin) Close(ctx context.Context) error {
	p.unmap(func() { p.ended = true })
	_, err := p.c.ask(ctx, kindUnpin, binary.LittleEndian.AppendUint32(nil, p.number))
	if err != nil && !errors.Is(err, engine.ErrPeerLost) { // which ends it, too
		return fmt.Errorf("unpin: %w", err)
	}
	return nil
}

// Hint has the server's cache heed a hint.
func (s *Space) Hint(ctx context.Context, keys []cache.Key, h cache.Hint) (r cache.HintResult,
	err error) {
	place := binary.LittleEndian.AppendUint64([]byte{byte(h.Kind)}, uint64(h.For))
	body, err := s.ask(ctx, kindHint, place, keys, nil)
	err = errors.Join(err, fromJSON(body, &r))
	return r, err
}

// HintEnvelope has the server's cache heed an envelope of hints, as cache.Namespace.HintEnvelope.
func (s *Space) HintEnvelope(ctx context.Context, data []byte) (list []cache.ActionOutcome,
	err error) {
	p := binary.LittleEndian.AppendUint16(nil, s.number)
	body, err := s.c.ask(ctx, kindEnvelope, append(p, data...))
	err = errors.Join(err, fromJSON(body, &list))
	return list, err
}

// Prefetch has the server's cache bring blocks into its memory.
func (s *Space) Prefetch(ctx context.Context, keys []cache.Key) ([]cache.Outcome, error) {
	body, err := s.ask(ctx, kindPrefetch, nil, keys, nil)
	return outcomesOf(body, len(keys), err)
}

// Estimate returns the cost of a Load of blocks by the server's cache; the way from there to this
// process is part of the rate of copies.
func (s *Space) Estimate(ctx context.Context, keys []cache.Key) (e cache.Estimate, err error) {
	body, err := s.ask(ctx, kindEstimate, nil, keys, nil)
	err = errors.Join(err, fromJSON(body, &e))
	return e, err
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
