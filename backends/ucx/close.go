// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"errors"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Close implements driver.Backend. Peers are closed first, as Peer.Close does
// it, all at once; then memories, so that no peer reaches them; then what others
// have to us. Memory of Alloc stays until it is closed itself.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { b.closeErr = b.close() })
	return b.closeErr
}

func (b *Backend) close() error {
	registry.remove(b.address.owner)
	b.gate.Shut()
	close(b.closing)
	b.gate.Wait()
	b.closePeers()
	err := b.closeMemories()
	for _, l := range b.sides {
		l.quit()
	}
	b.deaths.close()
	b.tasks.Wait()
	var wg sync.WaitGroup
	for _, l := range b.sides {
		for _, c := range l.inbound() {
			wg.Go(c.giveBack)
		}
	}
	wg.Wait()
	err = errors.Join(err, b.release())
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

// closeMemories gives all silent peers together the grace of one fence.
func (b *Backend) closeMemories() error {
	var errs []error
	deadline := time.Now().Add(b.cfg.FenceGrace)
	for _, m := range b.table.All() {
		errs = append(errs, m.close(deadline))
	}
	return errors.Join(errs...)
}

// release gives back what open made.
func (b *Backend) release() error {
	var errs []error
	for _, l := range b.sides {
		errs = append(errs, l.net.Close())
	}
	if b.control != nil {
		errs = append(errs, b.control.Close()) // attend ends by it
	}
	if b.event >= 0 {
		errs = append(errs, unix.Close(b.event))
	}
	return errors.Join(errs...)
}
