// SPDX-License-Identifier: Apache-2.0

package mem

import (
	"fmt"

	"github.com/sluicehq/sluice/driver"
)

// Receive implements driver.Backend.
func (b *Backend) Receive(msgs []driver.Message) (int, error) {
	n := b.box.Receive(msgs)
	if n == 0 && b.closed.Load() {
		return 0, driver.ErrClosed
	}
	return n, nil
}

// Answer implements driver.Backend.
func (b *Backend) Answer(conn uint64, msg []byte) error {
	if len(msg) > b.cfg.MessageMax {
		return fmt.Errorf("answer of %d bytes, at most %d: %w",
			len(msg), b.cfg.MessageMax, driver.ErrBounds)
	}
	b.mu.RLock()
	defer b.mu.RUnlock() // held during Send, so that no answer follows the end of the connection
	p := b.senders[conn]
	if p == nil {
		return driver.ErrPeerLost
	}
	return p.answers.Send(msg)
}
