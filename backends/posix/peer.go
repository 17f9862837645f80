// SPDX-License-Identifier: Apache-2.0

package posix

import (
	"context"
	"fmt"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// peer is a way of a backend to its own files.
type peer struct {
	ownfiles.Peer[extent]
	b *Backend
}

var _ driver.Peer = (*peer)(nil)

// Connect implements driver.Backend, for the backend's own Addr.
func (b *Backend) Connect(ctx context.Context, addr []byte) (driver.Peer, error) {
	p := &peer{b: b}
	if err := b.flights.Connect(ctx, addr, &p.Peer); err != nil {
		return nil, err
	}
	return p, nil
}

// Explain implements driver.Peer.
func (p *peer) Explain(_, remoteKey uint32) string {
	p.b.flights.Mu.Lock()
	defer p.b.flights.Mu.Unlock()
	text := p.b.choice
	m := p.Imported(remoteKey)
	if m == nil {
		return text
	}
	if f := m.Extent.file; f.mayPast() {
		text += fmt.Sprintf("; past the page cache in blocks of %d bytes", f.block)
	} else {
		text += "; through the page cache: " + f.why
	}
	if p.b.cfg.Durable {
		text += "; writes complete after fdatasync"
	}
	return text
}
