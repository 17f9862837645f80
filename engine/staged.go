// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
)

// Staged is the name of the engine's own route: a chain of backends through staging memory
// in DRAM, for pairs of memories that no single backend serves. HBM of this engine reaches
// HBM of a peer so, or a file: local memory -> staging -> staging of the peer -> its memory.
// The peer's engine makes the last hop, for which its program need do nothing.
//
//   - The bytes go in pieces of at most 1 MiB, several at a time, so that hops overlap.
//     Staging memory is bounded by Config.StagingBytes and taken when first needed.
//   - Route.Only = Staged asks for it, any other Only forbids it, Explain shows the hops.
//   - A transfer has one outcome, and its error names the hop.
//   - Abort and Revoke hold as for every route: see ErrUnproven for the one limit.
//
// It looks like a backend to the rest of the engine: a lane of its own, the last one.
const Staged = "staged"

// The shape of staging memory: slots of one piece and its list.
const (
	pieceBytes   = 1 << 20 // of data in a slot
	listBytes    = 64 << 10
	slotBytes    = pieceBytes + listBytes
	slotsMax     = 8 // pieces under way to one peer
	listEntry    = 16
	listMax      = listBytes / listEntry // descriptors in a piece
	stagedDescs  = 1024
	stagedPages  = 64 << 10
	stagedJobs   = 256     // batches of one peer before ErrFull
	windowsMax   = 4       // of one sender: each Peer of an engine has one
	stagedEvents = 1 << 16 // messages of peers that wait; one that sends more is not ours
)

// stager is that lane's backend. One goroutine, started when first needed, decides; the hops
// are Transfers of this engine, whose ends come to it as events.
type stager struct {
	e    *Engine
	lane *lane
	id   [16]byte // begins every message that is meant for a stager

	used atomic.Int64 // bytes of staging memory

	mu       sync.Mutex // guards what follows
	memories map[uint32]*stagedMemory
	lastKey  uint32
	queue    []stagedEvent
	messages int // of peers, in queue
	sessions map[uint64]session
	started  bool
	closed   bool
	wake     chan struct{}
	ended    chan struct{} // the goroutine has ended

	hellos chan struct{} // places for peers that ask for a window

	serving  sync.WaitGroup // goroutines for windows
	draining bool           // guarded by mu: no more windows
	holders  map[string]int // guarded by mu: windows by the address of the sender

	secrets map[[16]byte]*stagedMemory // guarded by mu: by what their tokens begin with
	ways    map[uint64]*sumWay         // guarded by mu
	audits  map[uint64]*audit          // guarded by mu

	windows map[uint64]*window // touched by the goroutine alone
}

// stagedEvent is something that the goroutine has to deal with.
type stagedEvent interface{ happen() }

func newStager(e *Engine) *stager {
	s := &stager{e: e, memories: map[uint32]*stagedMemory{}, sessions: map[uint64]session{}, holders: map[string]int{}, windows: map[uint64]*window{},
		secrets: map[[16]byte]*stagedMemory{}, ways: map[uint64]*sumWay{}, audits: map[uint64]*audit{},
		wake: make(chan struct{}, 1), ended: make(chan struct{}), hellos: make(chan struct{}, e.cfg.HandshakesMax)}
	rand.Read(s.id[:])
	return s
}

// addStager gives the engine its last lane, which needs no goroutine of a lane's.
func (e *Engine) addStager() {
	s := newStager(e)
	s.lane = &lane{e: e, index: len(e.lanes), b: s, caps: s.Caps(), fencer: s, kick: make(chan struct{}, 1)}
	e.stager, e.lanes = s, append(e.lanes, s.lane)
}

// push hands an event to the goroutine. It reports false when the stager is closed.
func (s *stager) push(ev stagedEvent) bool {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return false
	}
	if _, lost := ev.(*carrierLost); lost && !s.started {
		s.mu.Unlock()
		return true // nobody waits for its answer
	}
	if !s.started {
		s.started = true
		go s.run()
	}
	s.queue = append(s.queue, ev)
	s.mu.Unlock()
	s.rouse()
	return true
}

func (s *stager) rouse() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *stager) run() {
	defer close(s.ended)
	var events []stagedEvent
	for {
		s.mu.Lock()
		events, s.queue = s.queue, events[:0]
		s.messages = 0
		closed := s.closed
		s.mu.Unlock()
		for i, ev := range events {
			ev.happen()
			events[i] = nil
		}
		if len(events) > 0 {
			continue
		}
		if closed {
			return
		}
		<-s.wake
	}
}

// take gives n bytes of the budget, or says why not.
func (s *stager) take(n int64) error {
	if s.used.Add(n) > s.e.cfg.StagingBytes {
		s.used.Add(-n)
		return fmt.Errorf("%d of %d bytes of staging memory are in use: close peers or raise Config.StagingBytes: %w",
			s.used.Load(), s.e.cfg.StagingBytes, ErrFull)
	}
	return nil
}

// takeSlots gives memory for as many slots as the budget has, at most slotsMax.
func (s *stager) takeSlots() (n int, err error) {
	for n = slotsMax; n > 0; n /= 2 {
		if err = s.take(int64(n) * slotBytes); err == nil {
			return n, nil
		}
	}
	return 0, err
}

func (s *stager) giveSlots(n int) { s.used.Add(-int64(n) * slotBytes) }

// pool is staging memory with its region.
type pool struct {
	slots  int
	memory *Memory
	region *Region
}

// newPool makes staging memory that this backend reaches best.
func (s *stager) newPool(by *lane) (*pool, error) {
	n, err := s.takeSlots()
	if err != nil {
		return nil, err
	}
	o := AllocOptions{Purpose: "staging"}
	var m *Memory
	if by != nil && by.allocator != nil {
		o.Backend = by.caps.Name
		m, err = s.e.Alloc(uint64(n)*slotBytes, o)
		o.Backend = ""
	}
	if m == nil {
		m, err = Alloc(uint64(n)*slotBytes, o)
	}
	if err != nil {
		s.giveSlots(n)
		return nil, err
	}
	r, err := s.e.registerHidden(m.Segment())
	if err != nil {
		_ = m.Close()
		s.giveSlots(n)
		return nil, err
	}
	return &pool{slots: n, memory: m, region: r}, nil
}

// close gives it back, unless somebody may still use the bytes: then it stays for ever.
func (p *pool) close(s *stager, stuck bool) {
	if stuck || p.region.Close() != nil {
		return
	}
	_ = p.memory.Close()
	s.giveSlots(p.slots)
}

// Caps implements driver.Backend.
func (s *stager) Caps() driver.Caps {
	all := driver.KindsOf(driver.DRAM, driver.HBM, driver.File)
	return driver.Caps{Name: Staged, Reach: driver.Network, Pairs: driver.Pairs{all, all, all},
		DescsMax: stagedDescs, PagesMax: stagedPages, LenMax: pieceBytes}
}

// Register implements driver.Backend; the engine registers by the method of that name in
// lower case, which has the memories of the other lanes.
func (s *stager) Register(driver.Segment) (driver.Memory, error) { return nil, ErrNotSupported }

// Addr implements driver.Backend: whom messages are meant for, and what kinds of memory it
// reaches.
func (s *stager) Addr() []byte {
	if s.e.cfg.StagingBytes < slotBytes {
		return nil
	}
	return append(s.id[:len(s.id):len(s.id)], byte(s.reachable()))
}

// reachable are the kinds of memory that the engine can move from and to DRAM of its own.
func (s *stager) reachable() (kinds driver.Kinds) {
	for _, l := range s.e.lanes {
		if l != s.lane {
			kinds |= l.caps.Pairs[driver.DRAM]
		}
	}
	return kinds
}

// Connect implements driver.Backend; the engine has connect, which has the other lanes' peers.
func (s *stager) Connect(context.Context, []byte) (driver.Peer, error) {
	return nil, ErrNotSupported
}

// Poll implements driver.Backend: the goroutine delivers completions itself.
func (s *stager) Poll([]driver.Completion) (int, error) { return 0, nil }

// complete ends a tag.
func (s *stager) complete(tag uint64, err error) {
	s.e.finish(s.lane, &driver.Completion{Tag: tag, Err: err})
	s.lane.retry()
}

// drain ends all windows. The engine's life has ended.
func (s *stager) drain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.serving.Wait()
}

// serve runs f for a window, unless the engine closes.
func (s *stager) serve(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.serving.Go(f)
	return true
}

// Close implements driver.Backend: it ends the goroutine. Peers and windows are closed by now.
func (s *stager) Close() error {
	s.mu.Lock()
	s.closed = true
	if !s.started {
		s.started = true
		close(s.ended)
	}
	s.mu.Unlock()
	s.rouse()
	<-s.ended
	return nil
}
