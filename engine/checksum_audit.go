// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"crypto/subtle"
	"encoding/binary"
	"hash/crc32"
	"math/rand/v2"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// audit is what we do for a peer that compares checksums: sum ranges of our memory for which it
// shows tokens. One goroutine does it, in order.
type audit struct {
	s      *stager
	number uint64
	nonce  uint64 // names it to the peer
	to     []byte // the peer's stager
	from   string // the only address whose requests count
	peer   *Peer  // for the answers; a connection of its own, whose loss ends the audit
	by     *lane

	used     time.Duration // guarded by stager.mu: when it was asked last
	requests chan []byte
	bye      chan struct{}
	answers  [answersMax]*Transfer
	turn     int
}

const (
	auditsMax    = 16  // of one sender: each Peer of an engine has one
	auditBacklog = 256 // requests of one peer; one that sends more is not ours
	answersMax   = 4   // answers under way to one peer
)

// receiveAuditHello has a goroutine connect back, unless too many are at it.
func (s *stager) receiveAuditHello(m *stagedMessage) {
	s.welcome(func() { s.greetAudit(m) })
}

// greetAudit connects to who asked. Who cannot be reached gets no answer.
func (s *stager) greetAudit(m *stagedMessage) {
	back, nonce, to := s.callBack(m)
	if back == nil {
		return
	}
	a := &audit{s: s, number: rand.Uint64(), nonce: nonce, to: to, from: m.from, peer: back, by: m.lane,
		requests: make(chan []byte, auditBacklog), bye: make(chan struct{}, 1)}
	s.hire(a)
	b := binary.LittleEndian.AppendUint64(appendHead(nil, a.to, isAuditReady), a.nonce)
	b = appendOutcome(binary.LittleEndian.AppendUint64(b, a.number), nil)
	if a.tell(b) != nil || !s.serve(a.run) {
		a.end()
	}
}

// hire makes an audit known. Where its sender has enough, the one that has been idle for longest
// ends: most likely its connection was lost there, and its goodbye with it.
func (s *stager) hire(a *audit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var oldest *audit
	held := 0
	for _, other := range s.audits {
		if other.from == a.from {
			held++
			if oldest == nil || other.used < oldest.used {
				oldest = other
			}
		}
	}
	if held >= auditsMax {
		oldest.dismiss()
	}
	a.used = s.e.now()
	s.audits[a.number] = a
}

// dismiss has the goroutine end, soon.
func (a *audit) dismiss() {
	select {
	case a.bye <- struct{}{}:
	default:
	}
}

// receiveSum hands a request to its audit. What makes no sense is dropped.
func (s *stager) receiveSum(from string, body []byte) {
	if len(body) < 8 {
		return
	}
	s.mu.Lock()
	a := s.audits[binary.LittleEndian.Uint64(body)]
	if a != nil && a.from == from {
		a.used = s.e.now()
	}
	s.mu.Unlock()
	if a == nil || a.from != from {
		return
	}
	select {
	case a.requests <- body:
	default:
	}
}

// receiveSummed hands an answer, or the first word, to the way that asked.
func (s *stager) receiveSummed(l *lane, what byte, body []byte) {
	if len(body) < 8 {
		return
	}
	s.mu.Lock()
	w := s.ways[binary.LittleEndian.Uint64(body)]
	s.mu.Unlock()
	switch {
	case w == nil || w.conn.lane != l:
	case what == isSummed:
		w.heard(body[8:])
	default:
		select {
		case w.ready <- body[8:]:
		default: // a second one
		}
	}
}

func (s *stager) receiveAuditBye(from string, body []byte) {
	if len(body) != 8 {
		return
	}
	s.mu.Lock()
	a := s.audits[binary.LittleEndian.Uint64(body)]
	s.mu.Unlock()
	if a != nil && a.from == from {
		a.dismiss()
	}
}

// run serves until the peer, its goodbye or the engine ends it.
func (a *audit) run() {
	defer a.end()
	var b []byte
	for {
		select {
		case body := <-a.requests:
			b = appendHead(b[:0], a.to, isSummed)
			b = binary.LittleEndian.AppendUint64(b, a.nonce)
			if len(body) < 16 {
				continue
			}
			b = append(b, body[8:16]...)
			b = a.s.sumFor(a.by, body, b)
			if a.tell(b) != nil {
				return
			}
		case <-a.peer.Lost():
			return
		case <-a.bye:
			return
		case <-a.s.e.life.Done():
			return
		}
	}
}

// tell sends a message, which may be changed then, and does not wait until it has arrived.
func (a *audit) tell(b []byte) error {
	at := &a.answers[a.turn%answersMax]
	a.turn++
	if *at == nil {
		t, err := a.s.e.NewTransfer(a.peer, Write, Route{Only: a.by.caps.Name})
		if err != nil {
			return err
		}
		*at = t
	}
	t := *at
	if t.state.Load() == posted {
		if err := t.Wait(a.s.e.life); err != nil {
			return err
		}
	}
	message := append(t.message[:0], b...)
	_ = t.Reset()
	if err := t.Notify(message); err != nil {
		return err
	}
	return t.Post()
}

func (a *audit) end() {
	a.s.mu.Lock()
	delete(a.s.audits, a.number)
	a.s.mu.Unlock()
	if a.turn > 0 { // the last word is on its way
		if t := a.answers[(a.turn-1)%answersMax]; t != nil && t.state.Load() == posted {
			ctx, cancel := context.WithTimeout(a.s.e.life, a.s.e.cfg.AbortGrace)
			_ = t.Wait(ctx)
			cancel()
		}
	}
	_ = a.peer.Close() // ends the others
	for _, t := range a.answers {
		if t != nil {
			_ = t.Abort(context.Background())
			_ = t.Close()
		}
	}
}

// sumFor appends a code and the sums of a request's ranges, or why there are none.
func (s *stager) sumFor(l *lane, body, b []byte) []byte {
	at := len(b)
	var r sumRequest
	err := r.parse(body)
	if err == nil {
		b, err = s.sum(l, &r, append(b, 0))
	}
	if err != nil {
		return appendOutcome(b[:at], err)
	}
	return b
}

func (s *stager) sum(l *lane, r *sumRequest, b []byte) ([]byte, error) {
	if r.count > sumPagesMax(l.caps.MessageMax) && l.caps.MessageMax > 0 {
		return b, ErrBounds // the answer has no room
	}
	m, err := s.enterBy(l, r.token)
	if err != nil {
		return b, err
	}
	defer m.leave()
	mem, epoch, left := m.region.seg.Mem, m.epoch.Load(), uint64(sumWholeMax)
	for i := range r.count {
		off, n, ok := r.at(i, uint64(len(mem)))
		if !ok || n > left {
			return b, ErrBounds
		}
		left -= n
		sum := uint32(0)
		for n > 0 {
			if m.epoch.Load() != epoch {
				return b, ErrRevoked // a fence waits for us
			}
			k := min(n, 256<<10)
			sum = crc32.Update(sum, castagnoli, mem[off:off+k])
			off, n = off+k, n-k
		}
		b = binary.LittleEndian.AppendUint32(b, sum)
	}
	return b, nil
}

// enterBy admits who shows the token by which a lane's peers reach a memory. Who was admitted
// leaves. It looks at the token after it is counted: an epoch that ends later waits.
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
	now, err := m.region.mems[l.index].AppendToken(make([]byte, 0, sumTokenMax))
	if err != nil || subtle.ConstantTimeCompare(now, token) != 1 {
		m.leave()
		return nil, ErrRevoked
	}
	return m, nil
}
