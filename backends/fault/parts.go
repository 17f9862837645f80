// SPDX-License-Identifier: Apache-2.0

package fault

import "github.com/sluicehq/sluice/driver"

//go:generate go run shapes_generate.go

// parts are the optional interfaces of a wrapped backend; nil: it lacks it.
type parts struct {
	receiver  driver.Receiver
	armer     driver.Armer
	fencer    driver.Fencer
	counting  driver.Counting
	allocator driver.Allocator
}

func partsOf(b driver.Backend) (x parts) {
	x.receiver, _ = b.(driver.Receiver)
	x.armer, _ = b.(driver.Armer)
	x.fencer, _ = b.(driver.Fencer)
	x.counting, _ = b.(driver.Counting)
	x.allocator, _ = b.(driver.Allocator)
	return x
}

// peerParts are those of a wrapped connection.
type peerParts struct {
	canceler  driver.Canceler
	pager     driver.Pager
	persister driver.Persister
	notifier  driver.Notifier
	counter   driver.Counter
	watcher   driver.Watcher
	helper    driver.Helper
	explainer driver.Explainer
	yielder   driver.Yielder
}

func peerPartsOf(p driver.Peer) (x peerParts) {
	x.canceler, _ = p.(driver.Canceler)
	x.pager, _ = p.(driver.Pager)
	x.persister, _ = p.(driver.Persister)
	x.notifier, _ = p.(driver.Notifier)
	x.counter, _ = p.(driver.Counter)
	x.watcher, _ = p.(driver.Watcher)
	x.helper, _ = p.(driver.Helper)
	x.explainer, _ = p.(driver.Explainer)
	x.yielder, _ = p.(driver.Yielder)
	return x
}

// The parts that a shape is made of: each has the methods of one interface.
type (
	receiver  struct{ b *backend }
	armer     struct{ b *backend }
	fencer    struct{ b *backend }
	counting  struct{ b *backend }
	allocator struct{ b *backend }

	canceler  struct{ p *peer }
	pager     struct{ p *peer }
	persister struct{ p *peer }
	notifier  struct{ p *peer }
	counter   struct{ p *peer }
	watcher   struct{ p *peer }
	helper    struct{ p *peer }
	explainer struct{ p *peer }
)

// shapeOf gives a backend the interfaces that the wrapped one has.
func shapeOf(b *backend) driver.Backend {
	x := &b.parts
	return backendShapes[bits(x.receiver != nil, x.armer != nil, x.fencer != nil, x.counting != nil, x.allocator != nil)](b)
}

// peerShapeOf gives a connection the interfaces that the wrapped one has.
func peerShapeOf(p *peer) driver.Peer {
	x := &p.parts
	return peerShapes[bits(x.canceler != nil, x.pager != nil, x.persister != nil, x.notifier != nil, x.counter != nil,
		x.watcher != nil, x.helper != nil, x.explainer != nil)](p)
}

// bits makes a number of which the first flag is the lowest bit.
func bits(flags ...bool) (n int) {
	for i, set := range flags {
		if set {
			n |= 1 << i
		}
	}
	return n
}
