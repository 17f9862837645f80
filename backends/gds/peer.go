// SPDX-License-Identifier: Apache-2.0

package gds

import (
	"context"

	"github.com/sluicehq/sluice/backends"
	"github.com/sluicehq/sluice/internal/ownfiles"
)

// peer is a way of a backend to its own files.
type peer struct {
	ownfiles.Peer[extent]
	b *Backend
}

var _ interface {
	backends.Peer
	backends.Canceler
	backends.Explainer
	backends.Yielder
} = (*peer)(nil)

// Connect implements backends.Backend, for the backend's own Addr.
func (b *Backend) Connect(ctx context.Context, addr []byte) (backends.Peer, error) {
	p := &peer{b: b}
	if err := b.books.Connect(ctx, addr, &p.Peer); err != nil {
		return nil, err
	}
	return p, nil
}
