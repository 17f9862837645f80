// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import "github.com/sluicehq/sluice/csrc/verbs"

var _ link = (*verbs.Conn)(nil)

func openVerbs(c verbs.Config) (fabric, error) {
	v, err := verbs.Open(c)
	if err != nil {
		return nil, err
	}
	return verbsFabric{v}, nil
}

// verbsFabric is a context of verbs.
type verbsFabric struct{ *verbs.Context }

func (f verbsFabric) pin(rail int, mem []byte, flags uint32) (pin, error) {
	p, err := f.Pin(rail, mem, flags)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (f verbsFabric) pinDevice(rail int, d verbs.Device, flags uint32) (pin, error) {
	p, err := f.PinDevice(rail, d, flags)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (f verbsFabric) show(key uint32, mem []byte, pins []pin, prefer uint32) error {
	return f.Map(key, mem, verbsPins(pins), prefer)
}

func (f verbsFabric) showDevice(key uint32, addr, n uint64, pins []pin, prefer uint32) error {
	return f.MapDevice(key, addr, n, verbsPins(pins), prefer)
}

func verbsPins(pins []pin) []*verbs.Pin {
	list := make([]*verbs.Pin, len(pins))
	for i, p := range pins {
		list[i], _ = p.(*verbs.Pin) // nil stays nil
	}
	return list
}

func (f verbsFabric) connect(initiator bool, credit int) (link, error) {
	n, err := f.Connect(initiator, credit)
	if err != nil {
		return nil, err
	}
	return n, nil
}
