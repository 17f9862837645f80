// SPDX-License-Identifier: Apache-2.0

package rdma

import "github.com/sluicehq/sluice/csrc/verbs"

// attend takes the news of C until Close needs none any more.
func (b *Backend) attend() {
	for b.control.Wait() == nil && !b.deaf.Load() {
		for {
			n, ok := b.net.News()
			if !ok {
				break
			}
			b.heard(n)
		}
	}
}

// heard passes news on to the connections that they concern.
func (b *Backend) heard(n verbs.News) {
	if n.Conn != 0 {
		if e := b.end(n.Conn); e != nil {
			e.news(n)
		}
		return
	}
	if n.Rail < 0 || n.Rail >= len(b.rails) {
		return
	}
	r := b.rails[n.Rail]
	switch n.Kind {
	case verbs.PortUp:
		r.up.Store(true)
		b.net.RailUp(r.index, true)
		b.hurry()
	case verbs.PortDown:
		r.up.Store(false)
		b.net.RailUp(r.index, false)
		b.hurry()
	case verbs.DeviceGone:
		r.gone.Store(true)
		b.net.RailUp(r.index, false)
		b.hurry()
	}
}

// hurry has all peers look at their queue pairs now.
func (b *Backend) hurry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for p := range b.peers {
		p.mender.post(event{kind: eventHurry})
	}
}
