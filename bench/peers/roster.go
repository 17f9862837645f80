// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"fmt"
	"os"
	"path/filepath"
)

// Where the drivers are: Bin are those in Go, Scripts those in Python, which run with Python.
type Where struct {
	Bin, Scripts string
	Python       func(peer string) string // the interpreter of a peer's environment
	Files        string                   // a folder on the disk that lane file measures
}

// roster is a list that grows.
type roster struct {
	Where
	list []Participant
}

// Participants are all there are, those of one lane together. What cannot run says so itself.
func Participants(w Where) []Participant {
	r := &roster{Where: w}
	r.host()
	r.tcp()
	r.rdma()
	r.file()
	return r.list
}

func (r *roster) host() {
	r.own(Host, "shm", "foreign", "ucx")
	r.bindings()
	r.nixl(Host, nil, "", "polled")
	r.script(Host, "mooncake", "mooncake", "mooncake_engine.py", nil)
	r.yardstick(Host, "ucx_perftest", "perftest")
}

// bindings are ours from Python, with memory that the driver has already: our own API, and the
// program that drives NIXL over our face of it.
func (r *roster) bindings() {
	r.script(Host, "sluice-python", "sluice", "sluice_engine.py", nil)
	r.faced(Host)
}

func (r *roster) tcp() {
	r.own(TCP, "tcp", "ucx-tcp")
	r.nixl(TCP, []string{"UCX_TLS=tcp", "UCX_NET_DEVICES=lo"}, "", "polled")
	r.script(TCP, "mooncake", "mooncake", "mooncake_engine.py", nil)
	r.yardstick(TCP, "ucx_perftest", "perftest")
}

func (r *roster) rdma() {
	begin := len(r.list)
	r.own(RDMA, "rdma")
	r.nixl(RDMA, []string{"UCX_TLS=rc,self"}, "", "polled")
	r.yardstick(RDMA, "perftest", "perftest")
	for i := begin; i < len(r.list); i++ {
		r.list[i].Needs = func() error { return needsDevice(verbsDevices) }
	}
}

// file has one process for each, and another that keeps a file for it.
func (r *roster) file() {
	begin := len(r.list)
	r.own(File, "posix")
	r.script(File, "nixl", "nixl", "nixl_agent.py", nil, "file")
	r.script(File, "nixl-uring", "nixl", "nixl_agent.py", nil, "file", "uring")
	r.faced(File, "file")
	r.yardstick(File, "fio", "fio")
	for i := begin; i < len(r.list); i++ {
		r.list[i].Target = []string{filepath.Join(r.Bin, "file"), r.Files}
	}
}

// own adds ours, driven in Go.
func (r *roster) own(lane Lane, ways ...string) {
	for _, way := range ways {
		r.list = append(r.list, Participant{Name: "sluice-" + way, Lane: lane, Ours: true,
			Command: []string{filepath.Join(r.Bin, "sluice"), way}})
	}
}

// script adds a driver in Python.
func (r *roster) script(lane Lane, name, peer, script string, env []string,
	args ...string) *Participant {
	r.list = append(r.list, Participant{Name: name, Lane: lane, Env: env, Scripted: true,
		Ours:    peer == "sluice",
		Command: append([]string{r.Python(peer), filepath.Join(r.Scripts, script)}, args...)})
	return &r.list[len(r.list)-1]
}

// nixl adds NIXL's agent with settings of the driver.
func (r *roster) nixl(lane Lane, env []string, settings ...string) {
	for _, setting := range settings {
		name, args := "nixl", []string(nil)
		if setting != "" {
			name, args = "nixl-"+setting, []string{setting}
		}
		r.script(lane, name, "nixl", "nixl_agent.py", env, args...)
	}
}

// faced adds the same driver over our face of NIXL's API: what a user who switches gets.
func (r *roster) faced(lane Lane, args ...string) {
	p := r.script(lane, "sluice-nixl", "sluice", "nixl_agent.py", nil, args...)
	p.Command = append([]string{p.Command[0], "-m", "sluice.nixl.shim"}, p.Command[1:]...)
}

func (r *roster) yardstick(lane Lane, name, program string) {
	r.list = append(r.list, Participant{Name: name, Lane: lane, Yardstick: true,
		Command: []string{filepath.Join(r.Bin, program)}})
}

// verbsDevices is where the kernel lists devices for RDMA.
const verbsDevices = "/sys/class/infiniband"

// needsDevice is nil where there is a device for RDMA.
func needsDevice(folder string) error {
	if list, err := os.ReadDir(folder); err == nil && len(list) > 0 {
		return nil
	}
	return fmt.Errorf("no RDMA device in %s: make bench-rdma measures sluice beside perftest in "+
		"a guest with soft-RoCE: %w", folder, ErrUnsupported)
}
