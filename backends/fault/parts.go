// SPDX-License-Identifier: Apache-2.0

package fault

import "github.com/sluicehq/sluice/backends"

//go:generate go run shapes_generate.go

// parts are the optional interfaces of a wrapped backend; nil: it lacks it.
type parts struct {
	receiver  backends.Receiver
	armer     backends.Armer
	fencer    backends.Fencer
	counting  backends.Counting
	allocator backends.Allocator
}

func partsOf(b backends.Backend) (x parts) {
	x.receiver, _ = b.(backends.Receiver)
	x.armer, _ = b.(backends.Armer)
	x.fencer, _ = b.(backends.Fencer)
	x.counting, _ = b.(backends.Counting)
	x.allocator, _ = b.(backends.Allocator)
	return x
}

// peerParts are those of a wrapped connection.
type peerParts struct {
	canceler  backends.Canceler
	pager     backends.Pager
	persister backends.Persister
	notifier  backends.Notifier
	counter   backends.Counter
	watcher   backends.Watcher
	helper    backends.Helper
	explainer backends.Explainer
	yielder   backends.Yielder
}

func peerPartsOf(p backends.Peer) (x peerParts) {
	x.canceler, _ = p.(backends.Canceler)
	x.pager, _ = p.(backends.Pager)
	x.persister, _ = p.(backends.Persister)
	x.notifier, _ = p.(backends.Notifier)
	x.counter, _ = p.(backends.Counter)
	x.watcher, _ = p.(backends.Watcher)
	x.helper, _ = p.(backends.Helper)
	x.explainer, _ = p.(backends.Explainer)
	x.yielder, _ = p.(backends.Yielder)
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
func shapeOf(b *backend) backends.Backend {
	x := &b.parts
	return backendShapes[bits(x.receiver != nil, x.armer != nil, x.fencer != nil, x.counting != nil, x.allocator != nil)](b)
}

// peerShapeOf gives a connection the interfaces that the wrapped one has.
func peerShapeOf(p *peer) backends.Peer {
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
