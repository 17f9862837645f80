// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ucx

import ucp "github.com/sluicehq/sluice/csrc/ucx"

var _ link = (*ucp.Conn)(nil)

func openUCX(c ucp.Config) (fabric, error) {
	u, err := ucp.Open(c)
	if err != nil {
		return nil, err
	}
	return ucxFabric{u}, nil
}

// ucxFabric is a context of UCX.
type ucxFabric struct{ *ucp.Context }

func (f ucxFabric) connect(worker int, address []byte) (link, error) {
	n, err := f.Connect(worker, address)
	if err != nil {
		return nil, err
	}
	return n, nil
}
