// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"crypto/subtle"
	"encoding/binary"
	"fmt"
	"sync"

	"github.com/sluicehq/sluice/csrc/crc"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/engine/internal/exchange"
	"github.com/sluicehq/sluice/internal/memfault"
)

// audit is what this engine does for a peer that compares checksums: it sums ranges of our
// memory for which the peer shows tokens. While a connection has requests, one goroutine
// answers them in order.
type audit struct {
	mu      sync.Mutex // guards what follows
	waiting [][]byte
	running bool
}

const (
	auditBacklog = 4 * asksMax // requests of one connection that wait
	summersMax   = 2           // sums that are made at once, for all peers
)

// ask takes a request.
func (a *audit) ask(from *sender, body []byte) {
	if len(body) < exchange.SumTag {
		return
	}
	a.mu.Lock()
	full := len(a.waiting) >= auditBacklog
	if !full {
		a.waiting = append(a.waiting, body)
	}
	begin := !full && !a.running
	a.running = a.running || begin
	a.mu.Unlock()
	switch {
	case full:
		err := fmt.Errorf("%d requests of this connection wait: %w", auditBacklog, ErrFull)
		from.answer(exchange.AppendOutcome(appendSummed(nil, body), err))
	case begin && !from.lane.e.stager.serve(func() { a.run(from) }):
		from.answer(exchange.AppendOutcome(appendSummed(nil, body), ErrClosed))
	}
}

func appendSummed(b, body []byte) []byte {
	return append(append(b, exchange.IsSummed), body[:exchange.SumTag]...)
}

// run answers requests while there are any.
func (a *audit) run(from *sender) {
	s := from.lane.e.stager
	var b []byte
	for {
		a.mu.Lock()
		if len(a.waiting) == 0 || from.ended() || s.e.life.Err() != nil {
			a.running = false
			a.waiting = nil
			a.mu.Unlock()
			return
		}
		body := a.waiting[0]
		a.waiting = a.waiting[1:]
		a.mu.Unlock()
		s.summing <- struct{}{}
		b = s.sumFor(from.lane, body[exchange.SumTag:], appendSummed(b[:0], body))
		<-s.summing
		from.answer(b)
	}
}

// ended reports whether the last word of the connection has come.
func (s *sender) ended() bool {
	select {
	case <-s.gone:
		return true
	default:
		return false
	}
}

// sumFor appends a code and the sums of a request's ranges, or why there are none.
func (s *stager) sumFor(l *lane, body, b []byte) []byte {
	var r exchange.Sum
	err := r.Parse(body)
	sums := b
	if err == nil {
		sums, err = s.sum(l, &r, append(b, 0))
	}
	if err != nil {
		return exchange.AppendOutcome(b, err)
	}
	return sums
}

func (s *stager) sum(l *lane, r *exchange.Sum, b []byte) (_ []byte, err error) {
	if r.Count > exchange.SumEntriesMax(l.caps.MessageMax) && l.caps.MessageMax > 0 {
		return b, ErrBounds // the answer has no room
	}
	m, err := s.enterBy(l, r.Token)
	if err != nil {
		return b, err
	}
	defer m.leave()
	defer memfault.Catch(&err, memfault.Begin())
	mem, epoch, left := m.region.seg.Mem, m.epoch.Load(), uint64(exchange.SumMax)
	at := 0
	for i := range r.Count {
		off, n, ok := r.At(i, uint64(len(mem)))
		if !ok || n > left || !m.region.seg.Only.Has(off, n, &at) {
			return b, ErrBounds
		}
		left -= n
		sum := uint32(0)
		for n > 0 {
			if m.epoch.Load() != epoch {
				return b, ErrRevoked // a fence waits for us
			}
			k := min(n, 256<<10)
			sum = crc.Update(sum, mem[off:off+k])
			off, n = off+k, n-k
		}
		b = binary.LittleEndian.AppendUint32(b, sum)
	}
	return b, nil
}

// enterBy admits a request that shows the token by which a lane's peers reach a memory, until
// leave. It looks at the token after it is counted: an epoch that ends later waits.
func (s *stager) enterBy(l *lane, token []byte) (*stagedMemory, error) {
	if len(token) < 16 {
		return nil, driver.ErrBadToken
	}
	s.mu.Lock()
	m := s.secrets[[16]byte(token)]
	s.mu.Unlock()
	if m == nil || m.region.mems[l.index] == nil || m.region.seg.Kind != driver.DRAM {
		return nil, ErrRevoked
	}
	m.mu.Lock()
	m.active++
	m.mu.Unlock()
	now, err := m.region.mems[l.index].AppendToken(make([]byte, 0, exchange.SumTokenMax))
	if err != nil || subtle.ConstantTimeCompare(now, token) != 1 {
		m.leave()
		return nil, ErrRevoked
	}
	return m, nil
}
