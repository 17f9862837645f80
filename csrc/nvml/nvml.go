// SPDX-License-Identifier: Apache-2.0

// Package nvml asks the NVIDIA driver, through NVML, NVIDIA's library that manages cards, which
// GPUs there are. The library is opened at run time.
package nvml

import "github.com/sluicehq/sluice/driver"

// Library is the library's usual name.
const Library = "libnvidia-ml.so.1"

// Findings are what the driver tells; what it does not say is empty or zero.
type Findings struct {
	Driver string // its version, "550.54.15"
	CUDA   string // the newest that the driver serves, "12.4"
	GPUs   []GPU  // in NVML's order, which is that of PCI addresses
}

// GPU is one card. What the driver does not say is empty, zero or -1.
type GPU struct {
	Index   int    `json:"index"` // as nvidia-smi numbers them; CUDA may number them otherwise
	Name    string `json:"name"`
	Bus     string `json:"bus"`     // of PCI, as the kernel spells it
	Compute string `json:"compute"` // the compute capability, "9.0"
	Memory  uint64 `json:"memory_total"`
	MIG     string `json:"mig"`               // "enabled" or "disabled"; empty: it has none
	State   int    `json:"performance_state"` // 0: full clocks, to 15; -1: not known
}

const installFix = "install the NVIDIA driver; containers: --gpus all"

func unavailable(reason, fix string) error {
	return &driver.UnavailableError{Backend: "nvml", Reason: reason, Fix: fix}
}
