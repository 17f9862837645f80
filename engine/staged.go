// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
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

// The shape of staging memory: see exchange.
const (
	pieceBytes  = exchange.PieceBytes
	slotBytes   = exchange.SlotBytes
	slotsMax    = 8 // pieces under way to one peer
	stagedDescs = 1024
	stagedPages = 64 << 10
	stagedJobs  = 256 // batches of one peer before ErrFull
	windowsMax  = 4   // of one ticket; each connection has one at most
)

// stager is that lane's backend. The hops are Transfers of this engine; each Peer that is
// reached by chains, and each window that a peer has been given, has a loop to which their
// ends come as events.
type stager struct {
	driver.BackendBase
	e    *Engine
	lane *lane

	used      atomic.Int64 // bytes of staging memory
	exchanged atomic.Bool  // tickets were given to other engines

	mu       sync.Mutex // guards what follows
	memories map[uint32]*stagedMemory
	lastKey  uint32
	windows  map[*window]struct{}
	holders  map[*ticket]int // windows by the ticket that their connections have shown
	origins  map[string]int  // and by what it was given to
	draining bool            // no more goroutines

	serving sync.WaitGroup // goroutines for windows and local peers
	opening chan struct{}  // places for windows that are being opened
}

func newStager(e *Engine) *stager {
	return &stager{e: e, memories: map[uint32]*stagedMemory{},
		windows: map[*window]struct{}{}, holders: map[*ticket]int{},
		origins: map[string]int{},
		opening: make(chan struct{}, e.cfg.HandshakesMax)}
}

// addStager gives the engine its last lane, which needs no goroutine of a lane's.
func (e *Engine) addStager() {
	s := newStager(e)
	s.lane = &lane{e: e, index: len(e.lanes), b: s, caps: s.Caps(), kick: make(chan struct{}, 1)}
	e.stager, e.lanes = s, append(e.lanes, s.lane)
}

// take gives n bytes of the budget, or says why not.
func (s *stager) take(n int64) error {
	if s.used.Add(n) > s.e.cfg.StagingBytes {
		s.used.Add(-n)
		return fmt.Errorf("%d of %d bytes of staging memory are in use: close peers or raise "+
			"Config.StagingBytes: %w",
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
	memory io.Closer
	region *Region
}

// newPool makes staging memory.
func (s *stager) newPool() (*pool, error) {
	n, err := s.takeSlots()
	if err != nil {
		return nil, err
	}
	m, err := Alloc(uint64(n)*slotBytes, AllocOptions{Purpose: "staging"})
	if err != nil {
		s.giveSlots(n)
		return nil, err
	}
	r, err := s.e.registerHidden(m.Segment())
	if err != nil {
		if m.Close() == nil { // else its bytes are in use still
			s.giveSlots(n)
		}
		return nil, err
	}
	return &pool{slots: n, memory: m, region: r}, nil
}

// close gives it back, unless a backend may still use the bytes: then it stays for ever.
func (p *pool) close(s *stager, stuck bool) {
	if stuck || p.region.Close() != nil || p.memory.Close() != nil {
		return
	}
	s.giveSlots(p.slots)
}

// Caps implements driver.Backend.
func (s *stager) Caps() driver.Caps {
	all := driver.KindsOf(driver.DRAM, driver.HBM, driver.File)
	return driver.Caps{Name: Staged, Reach: driver.Network, Pairs: driver.Pairs{all, all, all},
		DescsMax: stagedDescs, RunsMax: stagedPages, LenMax: pieceBytes}
}

// Register implements driver.Backend; the engine registers by the method of that name in
// lower case, which has the memories of the other lanes.
func (s *stager) Register(driver.Segment) (driver.Memory, error) { return nil, ErrNotSupported }

// Addr implements driver.Backend: what kinds of memory it reaches for peers.
func (s *stager) Addr() []byte {
	if s.e.cfg.StagingBytes < slotBytes {
		return nil
	}
	return []byte{byte(s.reachable())}
}

// FD and Arm implement driver.Backend: no goroutine waits for it.
func (s *stager) FD() int            { return -1 }
func (s *stager) Arm() (bool, error) { return false, nil }

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

// Poll implements driver.Backend: the loops deliver completions themselves.
func (s *stager) Poll([]driver.Completion) (int, error) { return 0, nil }

// complete ends a tag.
func (s *stager) complete(tag uint64, err error) {
	s.e.finish(s.lane, &driver.Completion{Tag: tag, Err: err})
	s.lane.retry()
}

// drain waits for all goroutines. The engine's life has ended.
func (s *stager) drain() {
	s.mu.Lock()
	s.draining = true
	s.mu.Unlock()
	s.serving.Wait()
}

// serve runs f in a goroutine, unless the engine closes.
func (s *stager) serve(f func()) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining {
		return false
	}
	s.serving.Go(f)
	return true
}

// Close implements driver.Backend: Peers and windows are closed by now.
func (s *stager) Close() error { return nil }
