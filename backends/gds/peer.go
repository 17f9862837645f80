// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"context"

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
