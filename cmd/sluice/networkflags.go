// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
)

// networkFlags are what a command line says about the backends that go over a network.
// settle and give tell them apart.
type networkFlags struct {
	devices string // of the backend that is meant
	ucx     ucxFlags
	rdma    rdmaFlags
	tcp     tcpFlags
}

func (n *networkFlags) register(c *cobra.Command) {
	c.Flags().StringVar(&n.devices, "devices", "",
		"of backend ucx: as UCX_NET_DEVICES, such as eth0 or mlx5_0:1; of backend rdma: DEVICE, "+
			"DEVICE:PORT or DEVICE:PORT#GID, with commas; without it the backend chooses")
	n.ucx.register(c)
	n.rdma.register(c)
	n.tcp.register(c)
}

// settle is give, and refuses flags that do not concern the backend: what is ignored in
// silence would be believed.
func (n *networkFlags) settle(backend string) error {
	n.give(backend)
	if n.devices != "" && backend != rdmaName && backend != ucxName {
		return usagef(
			"--devices is of backends %s and %s alone: backend %q has nothing of the kind", ucxName,
			rdmaName, backend)
	}
	return cmp.Or(n.check(backend, backend, backend), n.tcp.checkEnds())
}

// settleBeside is settle where UCX stands beside the backend.
func (n *networkFlags) settleBeside(backend string) error {
	n.give(ucxName)
	return cmp.Or(n.check(ucxName, backend, backend), n.tcp.checkEnds())
}

// settleAsked is settle where auto asks each backend that serves: --devices are those of ucx.
func (n *networkFlags) settleAsked(backend string) error {
	if backend != auto {
		return n.settle(backend)
	}
	return cmp.Or(n.settleBeside(auto), n.built())
}

// settleDoctor is settle for doctor, which opens each backend with what concerns it.
func (n *networkFlags) settleDoctor() error {
	n.give(ucxName)
	return cmp.Or(n.check(ucxName, rdmaName, tcpName), n.built())
}

// check refuses wrong values, and flags of another backend than the command opens with them.
func (n *networkFlags) check(ucx, rdma, tcp string) error {
	return cmp.Or(n.ucx.check(ucx), n.rdma.check(rdma), n.tcp.check(tcp))
}

// built refuses flags of backends that are not in this build.
func (n *networkFlags) built() error {
	for _, m := range makers {
		given := map[string][]string{ucxName: n.ucx.given(), rdmaName: n.rdma.given()}[m.name]
		if len(given) > 0 && !m.built() {
			return usagef("%s is of backend %s alone, which is not in this build: build with cgo",
				given[0], m.name)
		}
	}
	return nil
}

// give gives --devices to the backends that it concerns.
func (n *networkFlags) give(backend string) {
	if backend == rdmaName {
		n.rdma.devices = n.devices
	} else {
		n.ucx.devices = n.devices
	}
}

// examine finds, before anything is started, what would fail in each process.
func (n *networkFlags) examine(backend string) error {
	if backend == rdmaName {
		return n.rdma.examine()
	}
	if backend == tcpName {
		return n.tcp.examine()
	}
	return n.ucx.examine(backend)
}

// args are the flags once more, for a child process at the other end.
func (n *networkFlags) args(backend string) []string {
	devices := n.ucx.devices
	if backend == rdmaName {
		devices = n.rdma.other()
	}
	list := slices.Concat(n.ucx.args(), n.rdma.args(), n.tcp.args())
	if devices != "" {
		list = append(list, "--devices="+devices)
	}
	return list
}

// number is a flag of that value, unless it is 0.
func number(list []string, name string, value int) []string {
	if value == 0 {
		return list
	}
	return append(list, "--"+name+"="+strconv.Itoa(value))
}
