// Package blockdev defines what a block device promises, in the synchronous form
// (Device) and the asynchronous one bound to a worker (Queue), and has the back
// ends: files, raw block devices, memory and null. Package blockdevtest holds
// every one of them to the contract.
package blockdev
