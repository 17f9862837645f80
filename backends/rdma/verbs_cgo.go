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

func (f verbsFabric) connect(initiator bool, credit int) (link, error) {
	n, err := f.Connect(initiator, credit)
	if err != nil {
		return nil, err
	}
	return n, nil
}
