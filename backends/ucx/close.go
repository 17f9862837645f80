// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"context"
	"errors"
	"sync"

	"golang.org/x/sys/unix"
)

// Close implements driver.Backend. Peers are closed first, as Peer.Close does
// it, all at once; then memories, so that no peer reaches them; then what others
// have to us.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	b.gate.Shut()
	close(b.closing)
	b.gate.Wait()
	b.closePeers()
	for _, m := range b.table.All() {
		_ = m.revoke(context.Background()) // never fails
	}
	for _, c := range b.inbound() {
		c.say(quit{}.encode())
	}
	b.tasks.Wait()
	var wg sync.WaitGroup
	for _, c := range b.inbound() {
		wg.Go(c.giveBack)
	}
	wg.Wait()
	err := b.release()
	b.attending.Wait()
	b.ended.Store(true)
	return err
}

func (b *Backend) closePeers() {
	b.mu.Lock()
	open := make([]*peer, 0, len(b.peers))
	for p := range b.peers {
		open = append(open, p)
	}
	b.mu.Unlock()
	var wg sync.WaitGroup
	for _, p := range open {
		wg.Go(func() { _ = p.Close() }) // a peer's Close has nothing to report
	}
	wg.Wait()
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	if b.net != nil {
		errs = append(errs, b.net.Close())
	}
	if b.control != nil {
		errs = append(errs, b.control.Close()) // attend ends by it
	}
	if b.event >= 0 {
		errs = append(errs, unix.Close(b.event))
	}
	return errors.Join(errs...)
}
