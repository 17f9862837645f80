// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"fmt"
	"time"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/session"
)

// Import implements driver.Peer. It asks the owner, whose control goroutine
// answers; imports at the same time do not wait for each other.
func (p *peer) Import(tok []byte) (key uint32, size uint64, err error) {
	if err := p.enter(); err != nil {
		return 0, 0, err
	}
	defer p.gate.Exit()
	t, err := session.DecodeToken(tok, &p.owner.owner)
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	a, err := p.ask(&t)
	if err == nil {
		key, err = p.take(&t, a)
	}
	if err != nil {
		return 0, 0, fmt.Errorf("import memory: %w", err)
	}
	return key, t.Size, nil
}

// ask sends the question and waits for the answer.
func (p *peer) ask(t *session.Token) (*importAnswer, error) {
	done := make(chan *importAnswer, 1)
	p.mu.Lock()
	p.askID++
	id := p.askID
	p.asks[id] = done
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.asks, id)
		p.mu.Unlock()
	}()
	q := importRequest{id: id, key: t.Key, epoch: t.Epoch, secret: t.Secret}
	if err := p.link.Control(q.encode()); err != nil {
		return nil, err
	}
	timer := time.NewTimer(p.b.cfg.importMax)
	defer timer.Stop()
	select {
	case a := <-done:
		return a, a.status.Err()
	case <-p.lostCh:
		return nil, driver.ErrPeerLost
	case <-p.closing:
		return nil, driver.ErrClosed
	case <-timer.C:
		return nil, fmt.Errorf("no answer within %v, the peer may be frozen: %w",
			p.b.cfg.importMax, driver.ErrTimeout)
	}
}

// answered hands an answer to its asker; one that comes late is dropped.
func (p *peer) answered(a *importAnswer) {
	p.mu.Lock()
	done := p.asks[a.id]
	delete(p.asks, a.id)
	p.mu.Unlock()
	if done != nil {
		done <- a
	}
}

// take makes what the owner told known to C.
func (p *peer) take(t *session.Token, a *importAnswer) (uint32, error) {
	if a.size != t.Size {
		return 0, fmt.Errorf("the owner tells of %d bytes, the token of %d: %w", a.size, t.Size,
			driver.ErrBadToken)
	}
	key, err := p.link.Import(ucp.Import{Key: t.Key, Size: t.Size, Ticket: a.ticket,
		ReadOnly: a.readOnly})
	if err != nil {
		return 0, err
	}
	p.mu.Lock()
	p.imports[key] = struct{}{}
	p.mu.Unlock()
	return key, nil
}

// Drop implements driver.Peer.
func (p *peer) Drop(key uint32) {
	if !p.gate.Enter() {
		return
	}
	defer p.gate.Exit()
	p.mu.Lock()
	_, known := p.imports[key]
	delete(p.imports, key)
	p.mu.Unlock()
	if known {
		p.link.Drop(key)
	}
}
