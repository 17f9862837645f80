// SPDX-License-Identifier: Apache-2.0

package drivertest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// movers are the goroutines of the stress that write, and what they have in common.
type movers struct {
	h      *host
	p      driver.Peer
	local  uint32
	steady [][]byte // tokens
	lossy  bool     // the connection may break
	seed   uint64
	stop   chan struct{} // closed once all leases have ended
	each   []mover
	live   atomic.Int64 // movers that have not ended
	failed atomic.Bool  // one of them

	mu     sync.Mutex
	faults []string
}

// mover is one of them. They share no word that they change, which would slow them down.
type mover struct {
	over      atomic.Bool   // a batch of it failed, or it is done
	last      atomic.Uint64 // 1 + of the batches that it may end with, the first; 0: not yet
	submitted atomic.Uint64 // written by the mover alone
	completed uint64        // the poller's
	_         [96]byte
}

func (m *movers) fault(format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.faults) < 10 {
		m.faults = append(m.faults, fmt.Sprintf(format, args...))
	}
}

// storm imports all leases, and starts what writes to them until each has failed.
func (h *host) storm(q request) error {
	m := &movers{
		h: h, p: h.peer(q.Peer), local: h.region(q.Region).mem.Key(), steady: q.Steady,
		seed:  q.Seed,
		lossy: q.Lossy, stop: make(chan struct{}), each: make([]mover, len(q.Tokens)+len(q.Steady)),
	}
	var keys []uint32
	for _, token := range append(append([][]byte(nil), q.Tokens...), q.Steady...) {
		key, _, err := m.p.Import(token)
		if err != nil {
			return fmt.Errorf("import: %w", err)
		}
		keys = append(keys, key)
	}
	return h.startChore(q, func(*host, request, <-chan struct{}) outcome {
		return m.run(keys, len(q.Tokens))
	})
}

// run has a thread for each mover: a mover that loses its processor between a check and its
// act is what the stress is about.
func (m *movers) run(keys []uint32, leases int) outcome {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(len(keys) + 2))
	m.h.ledger.turn.Lock() // the tags are not the ledger's
	defer m.h.ledger.turn.Unlock()
	var writers, others sync.WaitGroup
	polled := make(chan struct{})
	m.live.Store(int64(len(keys)))
	for i, key := range keys {
		group := &writers
		if i >= leases {
			group = &others
		}
		group.Go(func() { m.write(i, key, i < leases) })
	}
	others.Go(m.imports)
	go func() {
		defer close(polled)
		m.poll(leases)
	}()
	writers.Wait()
	close(m.stop)
	others.Wait()
	<-polled
	o := outcome{faults: m.faults}
	for i := range m.each {
		o.count += int(m.each[i].completed)
	}
	return o
}

// write moves bytes to and from one memory until that fails. Where there was no revoke it must
// not, and goes on until one batch that began behind all revokes has succeeded. Most batches are
// short: the shorter, the more time goes to checks.
func (m *movers) write(number int, key uint32, revoked bool) {
	defer m.live.Add(-1)
	random := rand.New(rand.NewPCG(m.seed, uint64(number)))
	var batches [64]driver.Batch
	for i := range batches {
		n := []uint64{8, 64, 64, 64, 64, 64, 656, leaseLen}[random.IntN(8)]
		at := random.Uint64N(leaseLen - n + 1)
		d := driver.Desc{Local: at, Remote: at, Len: n, LocalKey: m.local, RemoteKey: key}
		batches[i].Op = driver.Write
		if random.IntN(16) == 0 {
			batches[i].Op, d.Local = driver.Read, leaseLen+at
		}
		batches[i].Descs = []driver.Desc{d}
	}
	self := &m.each[number]
	for seq := uint64(0); !self.over.Load(); seq++ {
		if !revoked && self.last.Load() == 0 && stopped(m.stop) {
			self.last.Store(seq + 1) // one of those that begin now must succeed
		}
		err := m.p.Submit(uint64(number)<<32|seq&0xffff_ffff, &batches[seq%64])
		switch {
		case err == nil:
			self.submitted.Store(self.submitted.Load() + 1)
		case errors.Is(err, driver.ErrFull):
			m.giveWay()
		default:
			m.ended(number, revoked, err)
		}
	}
	m.p.Drop(key)
}

// giveWay is what a mover does that finds no room. Until the first of them has failed they
// spin, so that each may lose its processor anywhere. Then all that is left is to tell the
// others, and dozens of spinning threads would keep from the processors the goroutines that
// bring that about.
func (m *movers) giveWay() {
	if m.failed.Load() {
		time.Sleep(50 * time.Microsecond)
		return
	}
	runtime.Gosched()
}

// ended judges the error that ended a mover.
func (m *movers) ended(number int, revoked bool, err error) {
	if !revoked && m.h.h.Replaces && errors.Is(err, driver.ErrRevoked) {
		return
	}
	m.each[number].over.Store(true)
	m.failed.Store(true)
	switch {
	case m.lost(err):
	case !revoked:
		m.fault("mover %d of memory that was not revoked: %v", number, err)
	case !errors.Is(err, driver.ErrRevoked):
		m.fault("mover %d: %v, want %v", number, err, driver.ErrRevoked)
	}
}

// lost reports whether an error is what a broken connection may bring.
func (m *movers) lost(err error) bool { return m.lossy && errors.Is(err, driver.ErrPeerLost) }

// poll takes completions until nothing moves any more.
func (m *movers) poll(leases int) {
	var done [64]driver.Completion
	for m.live.Load() > 0 || m.flying() {
		n, err := m.h.b.Poll(done[:])
		if err != nil {
			m.fault("poll: %v", err)
			return
		}
		for _, c := range done[:n] {
			number := int(c.Tag >> 32)
			each := &m.each[number]
			each.completed++
			if c.Err != nil {
				m.ended(number, number < leases, c.Err)
			} else if last := each.last.Load(); last > 0 && c.Tag&math.MaxUint32 >= last-1 {
				each.over.Store(true)
			}
		}
		if n == 0 {
			runtime.Gosched()
		}
	}
}

// flying reports whether a batch is still to complete. It is the poller's.
func (m *movers) flying() bool {
	for i := range m.each {
		if m.each[i].completed < m.each[i].submitted.Load() {
			return true
		}
	}
	return false
}

// imports makes memory known and forgets it again, beside the movers.
func (m *movers) imports() {
	for i := 0; !stopped(m.stop); i++ {
		key, _, err := m.p.Import(m.steady[i%len(m.steady)])
		if errors.Is(err, driver.ErrFull) {
			runtime.Gosched() // a revoke is under way there
			continue
		}
		if err != nil {
			if !m.lost(err) {
				m.fault("import memory that was not revoked: %v", err)
			}
			return
		}
		m.p.Drop(key)
	}
}
