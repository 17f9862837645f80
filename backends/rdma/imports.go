// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"fmt"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/clock"
	"github.com/sluicehq/sluice/internal/session"
	"github.com/sluicehq/sluice/internal/silence"
)

// imported is memory of the owner's that C knows.
type imported struct {
	key   uint32 // of the owner's
	epoch uint64
	pairs uint32 // a bit for each that reaches it
}

// asking is an import that waits for its answer.
type asking struct {
	token session.Token
	done  chan importResult // has one place
}

type importResult struct {
	slot uint32
	err  error
}

// Import implements driver.Peer. It asks the owner, whose control answers; imports at
// the same time do not wait for each other.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.gate.Exit()
	t, err := session.DecodeToken(tok, &p.owner.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	if key, err = p.ask(&t); err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	return key, t.Size, nil
}

// importsMax is how many times silence.ImportMax an owner may take that says something meanwhile.
const importsMax = 10

// ask sends the question and waits for the answer: for as long as the owner says something now and
// then, since large memory takes its NICs long, but not for ever.
func (p *peer) ask(t *session.Token) (uint32, error) {
	a := &asking{token: *t, done: make(chan importResult, 1)}
	p.mu.Lock()
	p.askID++
	id := p.askID
	p.asks[id] = a
	p.mu.Unlock()
	defer p.forgetAsking(id, a)
	q := importRequest{id: id, key: t.Key, epoch: t.Epoch, secret: t.Secret}
	p.ch.send(q.encode())
	watch, host, heard := clock.NewStopwatch(p.b.cfg.clock, p.b.cfg.Failure), quiet{ch: p.ch},
		p.ch.heard.Load()
	begin := watch.Look()
	for since := begin; ; {
		tick, timer := watch.Tick(since.Add(silence.ImportMax))
		select {
		case r := <-a.done:
			timer.Stop()
			return r.slot, r.err
		case <-p.lostCh:
			timer.Stop()
			return 0, driver.ErrPeerLost
		case <-p.closing:
			timer.Stop()
			return 0, driver.ErrClosed
		case <-tick:
			now := watch.Look()
			if n := p.ch.heard.Load(); n != heard {
				heard, since = n, now
			}
			if silent := host.lasts(now); silent >= p.b.cfg.Failure {
				return 0, silence.HostLost(silent)
			}
			if now.Sub(begin) >= importsMax*silence.ImportMax {
				return 0, fmt.Errorf("the peer has not answered within %v: %w",
					importsMax*silence.ImportMax, driver.ErrTimeout)
			}
			if now.Sub(since) >= silence.ImportMax {
				return 0, fmt.Errorf("the peer says nothing for %v, it may be frozen: %w",
					silence.ImportMax, driver.ErrTimeout)
			}
		}
	}
}

// forgetAsking takes an import off the list, with what came for it too late.
func (p *peer) forgetAsking(id uint32, a *asking) {
	p.mu.Lock()
	delete(p.asks, id)
	p.mu.Unlock()
	select {
	case r := <-a.done:
		if r.err == nil {
			p.Drop(r.slot)
		}
	default:
	}
}

// answered makes what the owner told known to C, before the next message is looked at: that
// may be the news that the epoch has ended. An answer that comes late is dropped.
func (p *peer) answered(m *importAnswer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := p.asks[m.id]
	if a == nil {
		return
	}
	delete(p.asks, m.id)
	var r importResult
	r.slot, r.err = p.take(&a.token, m)
	a.done <- r
}

// take checks an answer and has C know the memory. Preconditions: p.mu is held.
func (p *peer) take(t *session.Token, m *importAnswer) (uint32, error) {
	if err := m.status.Err(); err != nil {
		return 0, err
	}
	if m.size != t.Size || len(m.keys) != len(p.pairs) || m.base+m.size < m.base {
		return 0, fmt.Errorf("the owner tells of %d bytes over %d queue pairs, the token "+
			"of %d bytes: %w",
			m.size, len(m.keys), t.Size, driver.ErrBadToken)
	}
	if !p.hold.Enter() {
		return 0, driver.ErrClosed
	}
	defer p.hold.Exit()
	slot, err := p.link.Import(verbs.Import{Base: m.base, Size: m.size, ReadOnly: m.readOnly,
		RemoteKeys: m.keys})
	if err != nil {
		return 0, err
	}
	i := imported{key: t.Key, epoch: t.Epoch}
	for pair, k := range m.keys {
		if k != 0 {
			i.pairs |= 1 << pair
		}
	}
	p.imports[slot] = i
	return slot, nil
}

// expire ends what was imported of an epoch that is over.
func (p *peer) expire(m *expired) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.hold.Enter() {
		return
	}
	defer p.hold.Exit()
	for slot, i := range p.imports {
		if i.key == m.key && i.epoch <= m.epoch {
			p.link.Expire(slot)
		}
	}
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	if !p.gate.Enter() {
		return
	}
	defer p.gate.Exit()
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.imports[key]; known {
		delete(p.imports, key)
		p.link.Drop(key)
	}
}
