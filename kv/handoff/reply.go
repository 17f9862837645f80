// SPDX-License-Identifier: Apache-2.0

package handoff

import "github.com/sluicehq/sluice/engine"

// receive handles a message to the sender. It does not wait.
func (s *Sender) receive(n engine.Notification) {
	if n.Err != nil {
		return // each Push watches its own peer
	}
	m, err := decode(n.Data)
	if err != nil {
		s.count.strays.Add(1)
		return
	}
	s.mu.Lock()
	p := s.pushes[m.session]
	s.mu.Unlock()
	if p == nil {
		s.count.strays.Add(1)
		return
	}
	p.receive(&m)
}

func (p *Push) receive(m *message) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case m.kind == kindEnd:
		p.endThere(m.reason)
	case m.kind == kindTaken && p.finishing:
		p.succeed()
	case m.kind == kindGrant && !isClosed(p.granted):
		whole, err := p.grant.add(m, grantMax(len(p.blocks)))
		if err != nil {
			p.endThere(Garbled)
		} else if whole {
			close(p.granted)
		}
	default:
		p.endThere(Garbled)
	}
}

// endThere notes the receiver's reason. Precondition: p.mu is held.
func (p *Push) endThere(r Reason) {
	if p.reasonThere == 0 {
		p.reasonThere = r
		close(p.endedThere)
	}
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
