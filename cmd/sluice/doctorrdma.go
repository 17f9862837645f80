// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/backends/rdma"
	"github.com/sluicehq/sluice/cmd/sluice/internal/machine"
	"github.com/sluicehq/sluice/internal/options"
)

// rdmaChecks says which ports there are, which GID each would use and why not another one,
// where they lie, and what is wrong with them. That none can be used at all is found by
// opening the backend.
func rdmaChecks(spec backendSpec) []machine.Check {
	var cfg rdma.Config
	if options.Set(&cfg, spec.words) != nil {
		return nil // to open the backend says it, too
	}
	found, _ := rdma.Examine(cfg) // the findings are good in any case
	var checks []machine.Check
	for i := range found.Devices {
		d := &found.Devices[i]
		for j := range d.Ports {
			checks = append(checks, rdmaPort(d, &d.Ports[j], found.Nodes))
			if gids := rdmaGIDs(&d.Ports[j]); gids != "" {
				checks = append(checks, rdmaCheck("rdma-gids "+d.Ports[j].Name, machine.Note, gids,
					"a wrong GID reaches no peer, or by another network", ""))
			}
		}
	}
	return checks
}

func rdmaCheck(name string, state machine.State, found, why, fix string) machine.Check {
	return machine.Check{Name: name, State: state, Found: found, Why: why, Fix: fix,
		Backends: []string{"rdma"}}
}

func rdmaPort(d *rdma.DeviceFinding, p *rdma.PortFinding, nodes int) machine.Check {
	facts := []string{p.State, p.Rate, p.LinkLayer}
	if p.MTU > 0 {
		facts = append(facts, fmt.Sprintf("MTU %d", p.MTU))
	}
	if d.Bus == "" {
		facts = append(facts, "software, on no bus")
	} else {
		facts = append(facts, "PCI "+strings.Join(d.Path, " > "))
	}
	if d.Node >= 0 {
		facts = append(facts, fmt.Sprintf("NUMA node %d of %d", d.Node, max(nodes, 1)))
	}
	c := rdmaCheck("rdma "+p.Name, machine.OK, strings.Join(facts, ", "),
		"memory goes over the ports that are near it", "")
	if !p.Chosen {
		c.State, c.Why = machine.Note, "not used: beyond Config.Rails, or not named"
	}
	for _, problem := range p.Problems {
		c.State, c.Fix, c.Why = machine.Limited, problem.Fix, problem.What
		c.Found += "; " + problem.What
	}
	return c
}

// rdmaGIDs lists the one that is taken first, and then why not the others.
func rdmaGIDs(p *rdma.PortFinding) string {
	var taken, others []string
	for i := range p.GIDs {
		g := &p.GIDs[i]
		text := fmt.Sprintf("%d %s", g.Index, g.Address)
		if g.NetDev != "" {
			text += " on " + g.NetDev
		}
		text += " (" + g.Why + ")"
		if g.Chosen {
			taken = append(taken, "takes "+text)
		} else {
			others = append(others, "not "+text)
		}
	}
	return strings.Join(append(taken, others...), "; ")
}
