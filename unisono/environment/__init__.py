"""This process's place in its run, its variables and its terminal. The only package that reads the environment.

Our own launcher passes a World to every process on the command line. Other launchers set variables, each of which one
file in engines/ reads. Only variables that other libraries read are ever set: Unisono's processes do not communicate
through them.
"""

from unisono.environment.addresses import PORTS as PORTS
from unisono.environment.addresses import host_of as host_of
from unisono.environment.addresses import join_port as join_port
from unisono.environment.engines.kubernetes import STOPPED_STATUS as STOPPED_STATUS
from unisono.environment.engines.kubernetes import status_of_stop as status_of_stop
from unisono.environment.engines.slurm import first_host as first_host
from unisono.environment.engines.slurm import job as job
from unisono.environment.engines.torchrun import agent_hosts_store as agent_hosts_store
from unisono.environment.nodes import Nodes as Nodes
from unisono.environment.process_variables import cache as cache
from unisono.environment.process_variables import cache_folder as cache_folder
from unisono.environment.process_variables import inherited as inherited
from unisono.environment.process_variables import remember_secrets as remember_secrets
from unisono.environment.process_variables import set_for_libraries as set_for_libraries
from unisono.environment.process_variables import variables as variables
from unisono.environment.readers import READERS
from unisono.environment.readers import read_nodes as read_nodes
from unisono.environment.restart_count import RESTARTS as RESTARTS
from unisono.environment.terminal import draws_live_lines as draws_live_lines
from unisono.environment.terminal import in_a_kernel as in_a_kernel
from unisono.environment.terminal import terminal_columns as terminal_columns
from unisono.environment.terminal import wants_color as wants_color
from unisono.environment.world import ONE_EACH as ONE_EACH
from unisono.environment.world import DeviceAssignment as DeviceAssignment
from unisono.environment.world import World as World
from unisono.environment.world import assign as assign
from unisono.environment.world import assigned as assigned
from unisono.environment.world import use_readers

use_readers(READERS)
