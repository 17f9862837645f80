// SPDX-License-Identifier: Apache-2.0

package cuda

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
	b.mu.Lock()
	defer b.mu.Unlock() // so that none is sent once the connection has ended
	for p := range b.senders {
		if p.sender.Conn == conn {
			return p.answers.Send(msg)
		}
	}
	return driver.ErrPeerLost
}
